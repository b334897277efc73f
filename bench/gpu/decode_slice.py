"""Decode speed of DeepSeek-V3's geometry on one GPU, through the whole engine: scheduler, captured steps, sampling.

    python bench/gpu/decode_slice.py [--num-seqs 1 64 128 256] [--context 4096] [--steps 64] [--layers 61] [--json FILE]

All 61 layers with FP8 dummy weights, but 8 routed experts, top 8: at batch b every expert gets b tokens, the load per expert of a
wide expert-parallel deployment in which each rank holds a few experts. What the slice leaves out: dispatch and combine between ranks and
machines, and the imbalance of real routing.

The context is not computed: random latents are put into the pages and published as if prompts had been computed before, so each sequence
starts from a prefix hit and the first step computes its last page only.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from array import array
from pathlib import Path

import torch

from deepserve.config import EngineArgs
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.lockstep import expert_step
from deepserve.engine.request import SamplingParams, validate
from deepserve.messages import Submit

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 8, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 163840,
    "rope_theta": 10000, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                     "mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}  # fmt: skip


def make_engine(folder: Path, args: argparse.Namespace) -> Engine:
    (folder / "config.json").write_text(json.dumps({**V3, "num_hidden_layers": args.layers}))
    most = max(args.num_seqs)
    max_model_len = -(-(args.context + args.steps + 64) // 64) * 64
    options = {
        "model": str(folder), "device": args.device, "load_format": "dummy", "max_model_len": max_model_len, "max_num_seqs": most,
        "max_num_batched_tokens": max(2048, 64 * most), "max_dispatch_tokens_per_rank": most, "num_pages": most * max_model_len // 64,
    }  # fmt: skip
    if args.device == "cpu":  # a rehearsal
        options |= {"graphs": True, "async_scheduling": True, "weight_format": "fp8", "dtype": "float32"}
    return Engine(resolve(EngineArgs(**options)))


def pretend_computed(engine: Engine, prompt: list[int]) -> None:
    """Publish all whole pages of a prompt; what they hold is random already."""
    pages, tokens = engine.pages, array("i", prompt)
    num_pages = len(prompt) // pages.page_size
    taken = pages.allocate(num_pages)
    parent = pages.root_hash("")
    for page_idx, page in enumerate(taken):
        parent = pages.publish(page, tokens, page_idx, parent)
    pages.release(taken)


def measure(engine: Engine, num_seqs: int, args: argparse.Namespace) -> dict[str, float]:
    """Median time of a decode step of `num_seqs` sequences."""
    rng = random.Random(num_seqs)
    for i in range(num_seqs):
        prompt = [rng.randrange(2, V3["vocab_size"]) for _ in range(args.context + 1)]
        pretend_computed(engine, prompt)
        params = SamplingParams(temperature=0.0, max_tokens=args.steps + 16, ignore_eos=True)
        engine.submit(Submit(f"{num_seqs}-{i}", prompt, validate(prompt, params, engine.limits)))
    while len(engine.scheduler.running) < num_seqs or engine.scheduler.waiting:
        engine.step()
    for _ in range(8):
        engine.step()
    times, host = [], []
    for _ in range(args.steps):
        started = time.perf_counter()
        plan = engine.plan()
        planned = time.perf_counter()
        engine.run(plan, expert_step([plan.num_tokens], args.cap))
        times.append(time.perf_counter() - started)
        host.append(planned - started)
    engine.abort([f"{num_seqs}-{i}" for i in range(num_seqs)])
    engine.collect()
    engine.pages.forget_cached()
    step_s = statistics.median(times)
    return {"num_seqs": num_seqs, "step_ms": step_s * 1e3, "plan_ms": statistics.median(host) * 1e3, "tokens_per_s": num_seqs / step_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--device", default="cuda", help="cpu only rehearses, with few --layers")
    parser.add_argument("--json")
    args = parser.parse_args()
    args.cap = max(args.num_seqs)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), args)
    for cache in engine.runner.caches:
        cache.normal_(std=0.5)
    start_s = time.perf_counter() - started
    card = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    print(f"{card}, torch {torch.__version__}, {args.layers} layers, context {args.context}, start {start_s:.1f} s")
    print(engine.memory.table())
    rows = []
    print(f"{'sequences':>10}{'step, ms':>12}{'plan, ms':>12}{'tokens/s':>12}")
    for num_seqs in args.num_seqs:
        rows.append(measure(engine, num_seqs, args))
        row = rows[-1]
        print(f"{num_seqs:>10}{row['step_ms']:>12.2f}{row['plan_ms']:>12.2f}{row['tokens_per_s']:>12.0f}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"card": card, "torch": torch.__version__, "start_s": start_s, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
