"""Decode speed of DeepSeek-V3's geometry on one GPU, through the whole engine: scheduler, captured steps, sampling.

    python bench/gpu/decode_slice.py [--num-seqs 1 64 128 256] [--context 4096] [--steps 64] [--layers 61] [--no-breakdown] [--json FILE]

All 61 layers with FP8 dummy weights, but 8 routed experts, top 8: at batch b every expert gets b tokens, the load per expert of a
wide expert-parallel deployment in which each rank holds a few experts. What the slice leaves out: dispatch and combine between ranks and
machines, and the imbalance of real routing.

The context is not computed: random latents are put into the pages and published as if prompts had been computed before, so each sequence
starts from a prefix hit and the first step computes its last page only.

Host gap: the time of a step in which the GPU does nothing and waits for the host. With the breakdown (`breakdown.py`), printed for each
number of sequences: what each stage takes, and the sum of all ops alone, which is what a step without gaps and without anything between
its ops would take.
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
from breakdown import breakdown
from gpu_trace import trace

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


# Microseconds of ops at 128 sequences as the design page (section 11) has them, measured before there was an engine.
RECORDED_128 = {"mla_decode": 232, "linear 2112 x 7168": 18, "linear 24576 x 1536": 23, "linear 7168 x 16384": 51}


def make_engine(folder: Path, args: argparse.Namespace) -> Engine:
    (folder / "config.json").write_text(json.dumps({**V3, "num_hidden_layers": args.layers}))
    most = max(args.num_seqs)
    max_model_len = -(-(args.context + args.steps + 96) // 64) * 64
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


def measure(engine: Engine, num_seqs: int, args: argparse.Namespace) -> dict:
    """Median time of a decode step of `num_seqs` sequences, and where it goes."""
    rng = random.Random(num_seqs)
    for i in range(num_seqs):
        prompt = [rng.randrange(2, V3["vocab_size"]) for _ in range(args.context + 1)]
        pretend_computed(engine, prompt)
        params = SamplingParams(temperature=0.0, max_tokens=args.steps + 48, ignore_eos=True)
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
    inside = look_inside(engine, args) if args.breakdown else {}
    engine.abort([f"{num_seqs}-{i}" for i in range(num_seqs)])
    engine.collect()
    engine.pages.forget_cached()
    step_s = statistics.median(times)
    figures = {"num_seqs": num_seqs, "step_ms": step_s * 1e3, "plan_ms": statistics.median(host) * 1e3, "tokens_per_s": num_seqs / step_s}
    return figures | inside


def look_inside(engine: Engine, args: argparse.Namespace) -> dict:
    """Host gap, time of stages and of ops alone, in milliseconds a step."""

    def step() -> None:
        plan = engine.plan()
        engine.run(plan, expert_step([plan.num_tokens], args.cap))

    found = trace(step, 8)
    parts = breakdown(engine, step)
    alone = {": ".join(key): ms for key, ms in parts.alone.items()}
    inside = {"host_gap_ms": found.host_gap_ms, "busy_ms": found.busy_ms, "stages_ms": parts.stages, "alone_ms": parts.alone_ms}
    return inside | {"ops_alone_ms": alone, "table": parts.table()}


def print_inside(rows: list[dict], num_layers: int) -> None:
    """The breakdown of each row, and at 128 sequences what the design page had for the same ops."""
    for row in rows:
        if "table" in row:
            print(f"\n{row['num_seqs']} sequences\n{row['table']}")
        if row["num_seqs"] == 128 and "table" in row:
            for op, us in RECORDED_128.items():
                print(f"  design page, section 11: {op}, {num_layers} layers: {us * num_layers / 1e3:.2f} ms")
            print("  design page: all kernels of a step of 61 layers at 128 sequences together: about 33 ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--device", default="cuda", help="cpu only rehearses, with few --layers")
    parser.add_argument("--breakdown", action=argparse.BooleanOptionalAction, default=False)
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
    print(f"{'sequences':>10}{'step, ms':>12}{'plan, ms':>12}{'tokens/s':>12}{'host gap, ms':>15}{'ops alone, ms':>16}{'step / alone':>15}")
    for num_seqs in args.num_seqs:
        rows.append(measure(engine, num_seqs, args))
        row = rows[-1]
        cells = f"{row['step_ms']:>12.2f}{row['plan_ms']:>12.2f}{row['tokens_per_s']:>12.0f}{row.get('host_gap_ms', 0.0):>15.3f}"
        alone = row.get("alone_ms")
        cells += f"{alone:>16.2f}{row['step_ms'] / alone:>15.2f}" if alone else ""
        print(f"{num_seqs:>10}{cells}", flush=True)
    print_inside(rows, args.layers)
    if args.json:
        Path(args.json).write_text(json.dumps({"card": card, "torch": torch.__version__, "start_s": start_s, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
