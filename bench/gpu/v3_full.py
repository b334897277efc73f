"""All of DeepSeek-V3 on one machine of eight GPUs: 61 layers, 256 routed experts in FP8, drawn in place (no disk, no checkpoint).

    python bench/gpu/v3_full.py memory                  the arithmetic of device memory; needs no GPU
    python bench/gpu/v3_full.py all --out DIR [--part 1|2|3] every measurement, each as a process of its own with a time limit
    python bench/gpu/v3_full.py serve [--input 1024] [--output 2048] [--concurrency 1024] [--json FILE]
    python bench/gpu/v3_full.py skew [--skew 0.1] [--redundant 32] [--num-seqs 128] [--json FILE]
    (--gpus 8 --layers 61 --experts 32 --device cuda: smaller ones, and cpu, rehearse)

`all` runs, in three parts of less than ten minutes: decode steps at 32, 64, 96 and 128 sequences a GPU and 4k of context, without and with
one MTP draft (acceptance forced to 0.8 and marked so), served work of 1k in / 2k out at 1,024 requests at once; then 2k in / 1k out,
skewed routing with and without redundant experts, prefill of 4k prompts over tp 8 and dp 8 + ep 8; last, prefill on one half of the GPUs
and decode on the other (`pd_slice.py`), each with all the experts of half the model's number, since four GPUs do not hold 256.

serve: all requests are there at the start, spread over the ranks evenly, each with a prompt of its own, greedy, and none stops early. The
whole time counts, prompts included. Through the engine of each rank in lockstep; HTTP is left out.

skew: biases of every gate are drawn `--skew` wide instead of 0.02, so some experts are chosen far more often than others. The time of a
decode step is measured as experts start, then after the balancer has looked and moved, for instances without and with redundant experts.
"""

import argparse
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from decode_slice import V3, pretend_computed, v3
from ranks import Stepper, run_ranks

from deepserve.config import EngineArgs
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.request import SamplingParams, validate
from deepserve.messages import Submit
from eplb.config import EPLBConfig
from hw.groups import Groups
from hw.topology import ParallelConfig

GIB = 1 << 30
PUBLISHED = "TensorRT-LLM on one H200 machine, 1k/2k, 1,024 at once, without MTP: 1,436 output tokens/s/GPU"


def memory(gpus: int, num_experts: int, layers: int, num_seqs: int, tokens: int) -> dict[str, float]:
    """GiB of one GPU under dp + ep: attention, shared experts and embeddings whole on each, routed experts spread."""
    c = V3
    heads, rank, rope = c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    per_head = c["qk_nope_head_dim"] + c["v_head_dim"]
    hidden, dense = c["hidden_size"], c["first_k_dense_replace"]
    query = hidden * c["q_lora_rank"] + c["q_lora_rank"] * heads * (c["qk_nope_head_dim"] + rope)
    attention = query + hidden * (rank + rope) + heads * c["v_head_dim"] * hidden
    expand = rank * heads * per_head * 2  # bf16: absorbed products take it so
    expert = 3 * hidden * c["moe_intermediate_size"]
    moe_layers = max(0, layers - dense)
    scales = 1 + 4 / 128**2  # a float for each block
    return {
        "routed experts": moe_layers * num_experts / gpus * expert * scales / GIB,
        "shared experts": moe_layers * expert * scales / GIB,
        "attention": layers * (attention * scales + expand) / GIB,
        "dense layers": min(dense, layers) * 3 * hidden * c["intermediate_size"] * scales / GIB,
        "embedding and head, bf16": 2 * c["vocab_size"] * hidden * 2 / GIB,
        f"cache of {num_seqs} x {tokens} tokens": num_seqs * tokens * layers * (rank + rope) * 2 / GIB,
    }


def print_memory(args: argparse.Namespace) -> None:
    for num_seqs, tokens in ((128, 4096 + 128), (128, 1024 + 2048)):
        parts = memory(args.gpus, args.experts * args.gpus, args.layers, num_seqs, tokens)
        for name, gib in {**parts, "together": sum(parts.values())}.items():
            print(f"  {name:<32}{gib:>8.1f} GiB")
        print("  a card has 139.8 GiB; dispatch buffers take up to 1.5, steps of 8,192 tokens up to 5.5, the runtime about 1\n")


def make_engine(groups: Groups, args: argparse.Namespace, **options: Any) -> Engine:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(v3(args.layers, args.experts * args.gpus, narrow=args.device == "cpu")))
        options |= {"model": folder, "device": args.device, "load_format": "dummy", "data_parallel_size": args.gpus}
        if args.device == "cpu":  # a rehearsal
            options |= {"graphs": True, "async_scheduling": True, "weight_format": "fp8", "dtype": "float32"}
        return Engine(resolve(EngineArgs(**options)), groups)


def submit(engine: Engine, name: str, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.submit(Submit(name, prompt, validate(prompt, params, engine.limits)))


def serve(groups: Groups, args: argparse.Namespace) -> None:
    """One rank of the served work; the first prints."""
    started = time.perf_counter()
    mine = -(-args.concurrency // args.gpus)
    length = -(-(args.input + args.output + 64) // 64) * 64
    engine = make_engine(
        groups, args, max_model_len=length, max_num_seqs=mine, max_num_batched_tokens=args.batch, max_dispatch_tokens_per_rank=mine,
        num_pages=mine * length // 64, enable_prefix_caching=False,
    )  # fmt: skip
    stepper, rng = Stepper(engine), random.Random(groups.rank)
    start_s = time.perf_counter() - started
    submit(engine, "warm-up", [rng.randrange(2, engine.config.model.vocab_size) for _ in range(args.input)], 8)
    while stepper.step():
        pass
    for i in range(mine):
        submit(engine, str(i), [rng.randrange(2, engine.config.model.vocab_size) for _ in range(args.input)], args.output)
    groups.world.barrier()
    begun, steps, first, num_tokens = time.perf_counter(), [], {}, 0
    before = begun
    while stepper.step():
        now = time.perf_counter()
        for output in stepper.outputs:
            num_tokens += len(output.token_ids)
            first.setdefault(output.request_id, now - begun)
        if len(stepper.outputs) == mine:
            steps.append(now - before)
        before = now
    took_s = time.perf_counter() - begun
    total = sum(tokens for (tokens,) in groups.world.all_gather_ints([num_tokens]))
    assert total == mine * args.gpus * args.output, (total, mine)
    if groups.rank == 0:
        result = {
            "input": args.input, "output": args.output, "requests": mine * args.gpus, "gpus": args.gpus, "start_s": start_s,
            "wall_s": took_s, "output_tokens_per_s_per_gpu": total / took_s / args.gpus,
            "step_ms": statistics.median(steps or [math.nan]) * 1e3, "first_token_s": statistics.median(first.values()),
        }  # fmt: skip
        print(engine.memory.table())
        print(f"{args.input} in, {args.output} out, {result['requests']} requests at once, {args.layers} layers on {args.gpus} devices:")
        print(f"  start {start_s:.1f} s, wall {took_s:.1f} s, first token {result['first_token_s']:.1f} s, step {result['step_ms']:.1f} ms")
        print(f"  {result['output_tokens_per_s_per_gpu']:,.0f} output tokens/s/GPU ({PUBLISHED})", flush=True)
        save(args, result)


def skew(groups: Groups, args: argparse.Namespace) -> None:
    """One rank's decode steps under skewed routing, as experts start and after they have moved; the first prints."""
    most, rows = args.num_seqs, []
    length = -(-(args.context + args.steps * 8 + 512) // 64) * 64
    # Looks often enough to move within the run; what a step takes is measured between looks.
    eplb = EPLBConfig(num_redundant_experts=args.redundant, window_size=args.steps, step_interval=2 * args.steps, hysteresis=0.0)
    engine = make_engine(
        groups, args, max_model_len=length, max_num_seqs=most, max_num_batched_tokens=2048,
        max_dispatch_tokens_per_rank=most, num_pages=most * length // 64, eplb_config=eplb,
    )  # fmt: skip
    for number, layer in engine.runner.model.moe_layers().items():
        bias = layer.gate.bias
        assert bias is not None
        noise = torch.randn(bias.shape, generator=torch.Generator().manual_seed(number))
        bias.copy_((args.skew * noise).to(bias))
    for cache in engine.runner.caches:
        cache.normal_(std=0.5)
    stepper, rng = Stepper(engine), random.Random(groups.rank)
    for i in range(most):
        prompt = [rng.randrange(2, engine.config.model.vocab_size) for _ in range(args.context + 1)]
        pretend_computed(engine, prompt)
        submit(engine, str(i), prompt, length - args.context - 64)
    while len(engine.scheduler.running) < most or engine.scheduler.waiting:
        stepper.step()
    for state in ("as they start", "after looks"):
        times, placed = [], [list(layer.placement.phy2log) for layer in engine.runner.model.moe_layers().values()]
        for _ in range(args.steps):
            started = time.perf_counter()
            stepper.step()
            times.append(time.perf_counter() - started)
        moved = engine.load().num_moved_experts
        for _ in range(5 * args.steps):  # two looks and what they move
            stepper.step()
        balance = engine.take_balance()
        level = None if balance is None else balancedness(balance.tokens["decode"], placed, args.gpus)
        rows.append({"experts": state, "step_ms": statistics.median(times) * 1e3, "balancedness": level, "moved_to_first_rank": moved})
    if groups.rank == 0:
        print(f"{args.redundant} redundant experts, gate biases {args.skew} wide, {most} sequences on each of {args.gpus} devices")
        for row in rows:
            print(f"  experts {row['experts']}: step {row['step_ms']:.2f} ms, balancedness {row['balancedness']:.3f}")
        save(args, {"skew": args.skew, "redundant": args.redundant, "rows": rows})


def balancedness(tokens: list[list[int]], phy2log: list[list[int]], num_ranks: int) -> float:
    """Mean over layers of the mean load of ranks over that of the hottest, under these placements."""
    found = []
    for load, row in zip(tokens, phy2log, strict=True):
        replicas, slots = [row.count(logical) for logical in range(len(load))], len(row) // num_ranks
        ranks = [sum(load[e] / replicas[e] for e in row[r * slots : (r + 1) * slots]) for r in range(num_ranks)]
        found.append(sum(ranks) / len(ranks) / max(*ranks, 1e-9))
    return statistics.mean(found)


def save(args: argparse.Namespace, result: dict) -> None:
    if args.json:
        Path(args.json).write_text(json.dumps({**result, "torch": torch.__version__}, indent=1))


def plan_of(args: argparse.Namespace) -> list[tuple[int, str, int, list[str]]]:
    """(part, name, limit in seconds, command line)."""
    folder, gpus, size = Path(__file__).parent, str(args.gpus), ["--layers", str(args.layers), "--experts", str(args.experts)]
    size += ["--device", args.device]
    own = [str(folder / "v3_full.py")]
    shared = ["--gpus", gpus, *size]
    small = args.device == "cpu"  # a rehearsal
    context, steps, seqs = ("64", "4", ["2", "4"]) if small else ("4096", "32", ["32", "64", "96", "128"])
    decode = [
        str(folder / "decode_slice.py"),
        "--dp",
        gpus,
        *size,
        "--context",
        context,
        "--steps",
        steps,
        "--num-seqs",
        *seqs,
        "--batch",
        "2048",
    ]
    prompts = ["--prompts", "2", "--length", "64", "--batch", "64"] if small else ["--batch", "8192"]
    prefill = [str(folder / "prefill_slice.py"), *size, *prompts]
    load = ["--context", context, "--steps", steps, "--num-seqs", seqs[-1]]
    served = ["--concurrency", str(2 * args.gpus)] if small else []
    short, long = (["--input", "32", "--output", "8"],) * 2 if small else (["--output", "2048"], ["--input", "2048", "--output", "1024"])
    half = args.gpus // 2
    halves = ["--tp", str(half), "--dp", str(half), "--layers", str(args.layers), "--experts", str(args.experts * half)]
    halves += ["--device", args.device, *short, "--requests", str(2 * half if small else 128 * half)]
    return [
        (1, "decode", 130, decode),
        (1, "decode_mtp", 140, [*decode, "--mtp", "1"]),
        (1, "serve_1k_2k", 290, [*own, "serve", *shared, *served, *short]),
        (2, "serve_2k_1k", 200, [*own, "serve", *shared, *served, *long]),
        (2, "skew", 90, [*own, "skew", *shared, *load, "--redundant", "0"]),
        (2, "skew_redundant", 90, [*own, "skew", *shared, *load, "--redundant", str(4 * args.gpus)]),
        (2, "prefill_dp", 90, [*prefill, "--dp", gpus]),
        (2, "prefill_tp", 90, [*prefill, "--tp", gpus]),
        (3, "pd", 400, [str(folder / "pd_slice.py"), *halves]),
    ]


def run_all(args: argparse.Namespace) -> int:
    """Each measurement in turn. What fails or takes too long is said, and the rest goes on."""
    print_memory(args)
    out, failed = Path(args.out), 0
    out.mkdir(parents=True, exist_ok=True)
    for part, name, limit_s, command in plan_of(args):
        if args.part not in (None, part):
            continue
        line = [sys.executable, *command, "--json", str(out / f"{name}.json")]
        started = time.perf_counter()
        with open(out / f"{name}.txt", "w") as log:
            print("$", shlex.join(["python", os.path.relpath(line[1]), *line[2:]]), file=log, flush=True)
            try:
                code: int | str = subprocess.run(line, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s).returncode
            except subprocess.TimeoutExpired:
                code = f"none: stopped after {limit_s} s"
        failed += code != 0
        print(
            f"== {name}: {time.perf_counter() - started:.0f} s, exit code {code}\n{(out / f'{name}.txt').read_text()[-3000:]}", flush=True
        )
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "all", "serve", "skew"])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=32, help="routed experts for each GPU")
    parser.add_argument("--device", default="cuda", help="cpu only rehearses, with narrow layers")
    parser.add_argument("--part", type=int, choices=[1, 2, 3], help="of all")
    parser.add_argument("--out", default="v3_full", help="folder for what all finds")
    parser.add_argument("--input", type=int, default=1024, help="serve: prompt tokens")
    parser.add_argument("--output", type=int, default=2048, help="serve: generated tokens")
    parser.add_argument("--concurrency", type=int, default=1024, help="serve: requests at once, over all GPUs")
    parser.add_argument("--batch", type=int, default=8192, help="serve: most tokens of a step of a GPU")
    parser.add_argument("--skew", type=float, default=0.1, help="skew: standard deviation of gate biases")
    parser.add_argument("--redundant", type=int, default=32, help="skew: redundant experts over all GPUs")
    parser.add_argument("--num-seqs", type=int, default=128, help="skew: sequences of a GPU")
    parser.add_argument("--context", type=int, default=4096, help="skew: tokens of context")
    parser.add_argument("--steps", type=int, default=32, help="skew: steps of a measurement")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.what == "memory":
        print_memory(args)
    elif args.what == "all":
        return run_all(args)
    else:
        run_ranks(ParallelConfig(dp=args.gpus), serve if args.what == "serve" else skew, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
