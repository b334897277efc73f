"""How long the way to experts and back takes between GPUs, through the backend's own dispatch and combine.

    PYTHONPATH=. python bench/gpu/expert_comm.py [--dp 2] [--experts 8 128] [--kernels 8] [--json FILE]

Rows of 7168, eight experts a token, chosen at random. Low latency: in a graph, FP8 there and bf16 back, the cap of 256 tokens; the
GPUs write to each other's memory (hw/cuda/peers.py), or DeepEP does it, whose kernels use one multiprocessor for each expert, so few
experts take longer than many. Throughput: 16,384 tokens of each rank, FP8. Nothing is computed in between. Microseconds, means.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_trace import trace
from ranks import run_ranks

from hw.api import Activation, ExpertComm, ExpertMode, ExpertStep
from hw.cuda.backend import import_deep_ep
from hw.cuda.deep_ep import DeepEpComm
from hw.cuda.peers import PeerExpertComm
from hw.cuda.quantize import quantize
from hw.cuda.rules import DEEP_EP, PEERS
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


def ways(groups: Groups, num_local: int) -> list[tuple[str, ExpertComm, ExpertMode, int]]:
    """Who takes how many tokens of each rank, in which mode."""
    peers = PeerExpertComm(groups.ep, CAP)
    deep_ep = DeepEpComm(import_deep_ep(), groups.ep, CAP, low_latency=True)
    few = [(name, comm, ExpertMode.LOW_LATENCY, num) for num in (1, 64, 128, 256) for name, comm in ((PEERS, peers), (DEEP_EP, deep_ep))]
    return [*few, (DEEP_EP, deep_ep, ExpertMode.THROUGHPUT, LONG)]


def run(groups: Groups, args: argparse.Namespace) -> None:
    """One rank; the first prints."""
    runtime, rows = open_backend("cuda", groups, max_dispatch_tokens_per_rank=CAP).runtime, []
    for num_local in args.experts:
        for name, comm, mode, num_tokens in ways(groups, num_local):
            dense = torch.randn(num_tokens, HIDDEN, device=runtime.device, dtype=torch.bfloat16)
            x, step = Activation(dense, quantize(dense)), ExpertStep(mode, max(CAP, num_tokens))
            chosen = torch.rand(num_tokens, num_local * groups.world.size, device=runtime.device).argsort(-1)[:, :TOP_K].contiguous()
            weight = torch.rand(num_tokens, TOP_K, device=runtime.device)

            def there(x=x, chosen=chosen, weight=weight, step=step, num_local=num_local, comm=comm):
                return comm.dispatch(x, chosen, weight, step, num_local)

            y = torch.zeros(there().x.shape, device=runtime.device, dtype=torch.bfloat16)

            def back(there=there, y=y, weight=weight, comm=comm):
                return comm.combine(y, weight, there())

            captured, calls = mode is ExpertMode.LOW_LATENCY, REPEATS if mode is ExpertMode.LOW_LATENCY else 1
            call = runtime.capture(lambda back=back: [back() for _ in range(REPEATS)]) if captured else back
            us = microseconds(call, groups, calls)
            rows.append({"experts": num_local, "by": name, "mode": mode.value, "tokens": num_tokens, "us": us})
            kernels = trace(call, 2).table(args.kernels) if args.kernels else ""
            if groups.rank == 0:
                print("{experts} experts a GPU, {by}, {mode}, {tokens} tokens: {us:.1f} us there and back".format(**rows[-1]), flush=True)
                print(kernels, end="\n" * bool(kernels), flush=True)
    if groups.rank == 0 and args.json:
        args.json.write_text(json.dumps({"card": torch.cuda.get_device_name(), "gpus": args.dp, "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 128], help="of each GPU")
    parser.add_argument("--kernels", type=int, default=0, help="so many of each row's kernels, and how long they take")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    run_ranks(ParallelConfig(dp=args.dp), run, args)


if __name__ == "__main__":
    main()
