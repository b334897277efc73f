"""How long the way to experts and back takes between GPUs, through the backend's own dispatch and combine.

    PYTHONPATH=. python bench/gpu/expert_comm.py [--dp 2] [--experts 8 128] [--json FILE]

Rows of 7168, eight experts a token, chosen at random. Low latency: in a graph, rows quantised on their way, the cap of 256 tokens. The
library's kernels for it use one multiprocessor for each expert, so few experts take longer than many. Throughput: 16,384 tokens of each
rank, FP8. Nothing is computed in between. Microseconds, means.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from ranks import run_ranks

from hw.api import Activation, ExpertMode, ExpertStep
from hw.cuda.quantize import quantize
from hw.groups import Groups
from hw.select import open_backend
from hw.topology import ParallelConfig

HIDDEN, TOP_K, CAP, LONG, REPEATS = 7168, 8, 256, 16384, 10


def microseconds(call: Callable[[], object], groups: Groups, calls: int) -> float:
    """Of one of the `calls` that a call makes."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    groups.world.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPEATS):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / REPEATS / calls


def run(groups: Groups, args: argparse.Namespace) -> None:
    """One rank; the first prints."""
    backend = open_backend("cuda", groups, max_dispatch_tokens_per_rank=CAP)
    comm, runtime, rows = backend.expert_comm, backend.runtime, []
    for num_local in args.experts:
        comm.reserve(HIDDEN, num_local, torch.bfloat16)
        for mode, num_tokens in [*((ExpertMode.LOW_LATENCY, num) for num in (1, 64, 128, 256)), (ExpertMode.THROUGHPUT, LONG)]:
            dense = torch.randn(num_tokens, HIDDEN, device=runtime.device, dtype=torch.bfloat16)
            x, step = Activation(dense, quantize(dense)), ExpertStep(mode, max(CAP, num_tokens))
            chosen = torch.rand(num_tokens, num_local * groups.world.size, device=runtime.device).argsort(-1)[:, :TOP_K].contiguous()
            weight = torch.rand(num_tokens, TOP_K, device=runtime.device)

            def there(x=x, chosen=chosen, weight=weight, step=step, num_local=num_local):
                return comm.dispatch(x, chosen, weight, step, num_local)

            y = torch.zeros(there().x.shape, device=runtime.device, dtype=torch.bfloat16)

            def back(there=there, y=y, weight=weight):
                return comm.combine(y, weight, there())

            captured, calls = mode is ExpertMode.LOW_LATENCY, REPEATS if mode is ExpertMode.LOW_LATENCY else 1
            call = runtime.capture(lambda back=back: [back() for _ in range(REPEATS)]) if captured else back
            rows.append({"experts": num_local, "mode": mode.value, "tokens": num_tokens, "us": microseconds(call, groups, calls)})
            if groups.rank == 0:
                print("{experts} experts a GPU, {mode}, {tokens} tokens: {us:.1f} us there and back".format(**rows[-1]), flush=True)
    if groups.rank == 0 and args.json:
        args.json.write_text(json.dumps({"card": torch.cuda.get_device_name(), "gpus": args.dp, "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 128], help="of each GPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    run_ranks(ParallelConfig(dp=args.dp), run, args)


if __name__ == "__main__":
    main()
