"""Prefill speed of DeepSeek-V3's geometry on one GPU, through the whole engine.

    python bench/gpu/prefill_slice.py [--prompts 32] [--length 4096] [--batch 16384] [--layers 61] [--json FILE]

The model of `decode_slice.py`: FP8 dummy weights, 8 routed experts, top 8. Every prompt is new, so nothing comes from the prefix cache.
Steady: the steps between the first and the last, which are full.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from decode_slice import V3

from deepserve.config import EngineArgs
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.request import SamplingParams, validate
from deepserve.messages import Submit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16384, help="most tokens of a step")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**V3, "num_hidden_layers": args.layers}))
        options = EngineArgs(
            model=folder, device="cuda", load_format="dummy", max_model_len=args.length + 64, max_num_seqs=args.prompts,
            max_num_batched_tokens=args.batch, num_pages=(args.prompts + 1) * (args.length // 64 + 1), graphs=False,
        )  # fmt: skip
        engine = Engine(resolve(options))
    rng = random.Random(0)

    def submit(name: str) -> None:
        prompt = [rng.randrange(2, V3["vocab_size"]) for _ in range(args.length)]
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.submit(Submit(name, prompt, validate(prompt, params, engine.limits)))

    for i in range(4):  # kernels compile at first use
        submit(f"warm-up {i}")
    while engine.has_work:
        engine.step()
    for i in range(args.prompts):
        submit(str(i))
    torch.cuda.synchronize()
    started, marks = time.perf_counter(), []
    while engine.has_work:
        engine.step()
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
    total = args.prompts * args.length
    overall = total / (marks[-1] - started)
    full = args.batch / ((marks[-2] - marks[0]) / (len(marks) - 2)) if len(marks) > 3 else overall
    print(f"{torch.cuda.get_device_name()}, {args.layers} layers: {total} prompt tokens in {marks[-1] - started:.2f} s")
    print(f"{overall:,.0f} tokens/s overall, {full:,.0f} steady")
    if args.json:
        Path(args.json).write_text(json.dumps({"overall_tokens_per_s": overall, "steady_tokens_per_s": full, "args": vars(args)}))


if __name__ == "__main__":
    main()
