"""DeepSeek-V2-Lite's geometry (16B parameters, random bf16 weights) on one GPU, through the whole engine, beside transformers.

    python bench/gpu/v2lite.py [--num-seqs 1 64 256] [--prompt 1024] [--output 256] [--batch 16384] [--kernels 0] [--json FILE]

All requests of a row arrive at once, with prompts of their own, after others like them that are not counted. Columns: output tokens over
the wall, prompts included; median time from arrival to the first token; median step in which all sequences decode; the share of such a
step in which the GPU waits for the host.
transformers generates for one request on the same card, in the same run, with random weights of its own.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import torch
from gpu_trace import Trace, trace

from deepserve.config import EngineArgs
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.request import SamplingParams, validate
from deepserve.messages import Submit

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "bos_token_id": 100000, "eos_token_id": 100001, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                     "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip


def make_engine(args: argparse.Namespace) -> Engine:
    most, max_model_len = max(args.num_seqs), -(-(args.prompt + args.output + 64) // 64) * 64
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": args.layers}))
        options = {
            "model": folder, "device": args.device, "load_format": "dummy", "max_model_len": max_model_len, "max_num_seqs": most,
            "max_num_batched_tokens": args.batch, "max_dispatch_tokens_per_rank": most, "num_pages": most * max_model_len // 64,
            "enable_prefix_caching": False, "compile_ahead": args.device == "cuda",
        }  # fmt: skip
        if args.device == "cpu":  # a rehearsal
            options |= {"graphs": True, "async_scheduling": True, "dtype": "float32"}
        return Engine(resolve(EngineArgs(**options)))


def new_prompt(num_tokens: int) -> list[int]:
    return random.choices(range(2, 100000), k=num_tokens)


def submit(engine: Engine, name: str, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.submit(Submit(name, prompt, validate(prompt, params, engine.limits)))


def serve(engine: Engine, num_seqs: int, args: argparse.Namespace) -> dict[str, float]:
    """All requests at once, until the last one is done."""
    prompts = [new_prompt(args.prompt) for _ in range(num_seqs)]
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        submit(engine, str(i), prompt, args.output)
    first: dict[str, float] = {}
    steps: list[float] = []
    num_tokens, before = 0, started
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            num_tokens += len(output.token_ids)
            first.setdefault(output.request_id, now - started)
        if len(outputs) == num_seqs == len(first):
            steps.append(now - before)
        before = now
    wall = time.perf_counter() - started
    assert num_tokens == num_seqs * args.output, (num_tokens, num_seqs)
    return {
        "num_seqs": num_seqs, "tokens_per_s": num_tokens / wall, "first_token_ms": statistics.median(first.values()) * 1e3,
        "step_ms": statistics.median(steps[4:]) * 1e3,
    }  # fmt: skip


def traced(engine: Engine, num_seqs: int, args: argparse.Namespace) -> Trace:
    """A dozen steps in which `num_seqs` sequences decode."""
    for i in range(num_seqs):
        submit(engine, str(i), new_prompt(args.prompt), 64)
    while engine.scheduler.num_waiting or any(s.num_computed < s.num_prompt for s in engine.scheduler.running):
        engine.step()
    for _ in range(4):
        engine.step()
    found = trace(engine.step, 12)
    engine.abort([str(i) for i in range(num_seqs)])
    engine.collect()
    return found


def traced_prefill(engine: Engine, args: argparse.Namespace) -> Trace:
    """A step full of new prompts."""
    for i in range(3 * max(1, args.batch // args.prompt)):
        submit(engine, str(i), new_prompt(args.prompt), 1)
    engine.step()
    found = trace(engine.step, 1)
    while engine.has_work:
        engine.step()
    return found


def print_trace(found: Trace, num_kernels: int) -> None:
    print(f"traced: {found.span_ms:.3f} ms a step, busy {found.busy_ms:.3f}, host gap {found.host_gap_ms:.3f}")
    print(found.table(num_kernels), flush=True)


def transformers_tokens_per_s(args: argparse.Namespace, num_tokens: int = 24) -> float:
    """One request, greedy; the prompt's pass is not counted."""
    from transformers import AutoModelForCausalLM, DeepseekV2Config

    config = DeepseekV2Config(**{**CONFIG, "num_hidden_layers": args.layers})
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.randint(2, 100000, (1, args.prompt), device=args.device)

    def seconds(new_tokens: int) -> float:
        started = time.perf_counter()
        out = model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        assert out.shape[1] == args.prompt + new_tokens
        out.cpu()
        return time.perf_counter() - started

    seconds(2)
    return num_tokens / (seconds(num_tokens + 1) - seconds(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16384, help="most tokens of a step")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--kernels", type=int, default=0, help="print the largest kernels of a step")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu only rehearses, with few --layers")
    parser.add_argument("--json")
    args = parser.parse_args()
    engine = make_engine(args)
    start_s = time.time() - psutil.Process().create_time()
    card = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}, {args.layers} layers; {args.prompt} tokens in, {args.output} out")
    print(f"import to ready: {start_s:.1f} s", flush=True)
    for num_seqs in args.num_seqs:  # kernels compile, and libraries load theirs, at first use: every kind of step once
        for i in range(num_seqs):
            submit(engine, str(i), new_prompt(args.prompt), min(args.output, 48))
        while engine.has_work:
            engine.step()
    rows = []
    print(f"{'requests':>10}{'output tokens/s':>18}{'first token, ms':>18}{'step, ms':>12}{'host gap':>12}")
    for num_seqs in args.num_seqs:
        row = serve(engine, num_seqs, args)
        found = traced(engine, num_seqs, args) if args.device == "cuda" else None
        row["host_gap_share"] = found.host_gap_share if found else 0.0
        rows.append(row)
        cells = f"{row['tokens_per_s']:>18,.0f}{row['first_token_ms']:>18.1f}{row['step_ms']:>12.2f}{row['host_gap_share']:>12.1%}"
        print(f"{num_seqs:>10}{cells}", flush=True)
        if args.kernels and found:
            print_trace(found, args.kernels)
    if args.kernels and args.device == "cuda":
        print(f"a step of {args.batch} prompt tokens")
        print_trace(traced_prefill(engine, args), args.kernels)
    peer = None if args.skip_transformers else transformers_tokens_per_s(args)
    if peer is not None:
        print(f"transformers, one request: {peer:.1f} tokens/s")
    if args.json:
        figures = {"card": card, "torch": torch.__version__, "start_s": start_s, "rows": rows, "transformers_tokens_per_s": peer}
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
