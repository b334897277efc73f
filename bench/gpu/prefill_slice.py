"""Prefill speed of DeepSeek-V3's geometry, through the whole engine.

    python bench/gpu/prefill_slice.py [--dp 1] [--tp 1] [--prompts 32] [--length 4096] [--batch 16384] [--layers 61] [--json FILE]

The model of `decode_slice.py`: FP8 dummy weights, 8 routed experts for each GPU, top 8. Every prompt is new, so nothing comes from the
prefix cache. `--prompts` and `--batch` are those of each DP rank. Steady: the steps between the first and the last, which are full.
"""

import argparse
import json
import platform
import random
import tempfile
import time
from pathlib import Path

import torch
from decode_slice import v3
from ranks import Stepper, run_ranks

from deepserve.config import EngineArgs
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.request import SamplingParams, validate
from deepserve.messages import Submit
from hw.groups import Groups
from hw.topology import ParallelConfig


def make_engine(groups: Groups, args: argparse.Namespace) -> Engine:
    num_pages = (args.prompts + 1) * (args.length // 64 + 1)
    options = {
        "device": args.device, "load_format": "dummy", "max_model_len": args.length + 64, "max_num_seqs": args.prompts,
        "max_num_batched_tokens": args.batch, "num_pages": num_pages, "graphs": False, "compile_ahead": False,
        "data_parallel_size": args.dp, "tensor_parallel_size": args.tp, "enable_dbo": args.enable_dbo,
    }  # fmt: skip
    if args.device == "cpu":  # a rehearsal
        options |= {"weight_format": "fp8", "dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps(v3(args.layers, args.experts * args.dp * args.tp, narrow=args.device == "cpu"))
        )
        return Engine(resolve(EngineArgs(model=folder, **options)), groups)


def run(groups: Groups, args: argparse.Namespace) -> None:
    """One rank; the first prints."""
    engine = make_engine(groups, args)
    stepper, runtime = Stepper(engine), engine.backend.runtime
    rng = random.Random(groups.rank)

    def submit(name: str) -> None:
        if engine.groups.is_leader:
            prompt = [rng.randrange(2, engine.config.model.vocab_size) for _ in range(args.length)]
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            engine.submit(Submit(name, prompt, validate(prompt, params, engine.limits)))

    for i in range(4):  # kernels compile at first use
        submit(f"warm-up {i}")
    while stepper.step():
        pass
    for i in range(args.prompts):
        submit(str(i))
    runtime.synchronize()
    groups.world.barrier()
    started, marks = time.perf_counter(), []
    while stepper.step():
        runtime.synchronize()
        marks.append(time.perf_counter())
    if groups.rank == 0:
        report(started, marks, args)


def report(started: float, marks: list[float], args: argparse.Namespace) -> None:
    """marks: when each step was done."""
    num_gpus, took_s = args.dp * args.tp, marks[-1] - started
    total = args.dp * args.prompts * args.length
    overall = total / took_s
    full = args.dp * args.batch / ((marks[-2] - marks[0]) / (len(marks) - 2)) if len(marks) > 3 else overall
    card = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    print(f"{card} x {num_gpus}, dp {args.dp}, tp {args.tp}, {args.layers} layers: {total} prompt tokens in {took_s:.2f} s")
    print(f"{overall:,.0f} tokens/s overall, {full:,.0f} steady, {full / num_gpus:,.0f} steady on each GPU")
    if args.json:
        Path(args.json).write_text(json.dumps({"overall_tokens_per_s": overall, "steady_tokens_per_s": full, "args": vars(args)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16384, help="most tokens of a step")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=8, help="routed experts for each GPU")
    parser.add_argument("--enable-dbo", action="store_true", help="every step as two micro-batches; needs several ranks")
    parser.add_argument("--device", default="cuda", help="cpu only rehearses, with narrow layers")
    parser.add_argument("--json")
    args = parser.parse_args()
    run_ranks(ParallelConfig(dp=args.dp, tp=args.tp), run, args)


if __name__ == "__main__":
    main()
