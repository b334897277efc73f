"""Products of activations with weights on one CPU thread: the native kernels beside torch's (oneDNN, MKL), by number of rows.

    python bench/cpu_products.py [--seconds 0.3]

Figures are GFLOP/s of CPU time, best of the calls in that many seconds, so that other processes on the machine count for little. Weights of
"few rows" are larger than any cache: there it is memory that limits, and what matters is the GB/s at which weights come.
"""

import argparse
import time
from collections.abc import Callable

import torch

from hw.select import open_backend

# rows, inner, outer
FEW_ROWS = [(rows, 512, 128_000) for rows in (1, 2, 4, 16)]
MANY_ROWS = [(128, 512, 512), (1024, 512, 832), (1024, 256, 1536), (1024, 1024, 512), (1024, 512, 3072)]


def best_s(work: Callable[[], object], seconds: float) -> float:
    """CPU seconds of the fastest call."""
    work()
    best, until = float("inf"), time.process_time() + seconds
    while time.process_time() < until:
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="CPU time for each figure")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    native = open_backend("cpu", cpu_kernels="native")
    native.ops.kernels.has_amx = False  # the kernels themselves, also where a matrix unit would be left to torch
    print(f"native kernels for {native.ops.kernels.target}, torch {torch.__version__}; GFLOP/s, and GB/s of weights, on one thread")
    print(f"{'dtype':>9} {'rows':>5} {'inner':>6} {'outer':>7} {'native':>8} {'torch':>8} {'ratio':>6} {'native GB/s':>12}")
    for dtype in (torch.bfloat16, torch.float32):
        for rows, inner, outer in FEW_ROWS + MANY_ROWS:
            x = torch.randn(rows, inner).to(dtype)
            weight = native.runtime.empty((outer, inner), dtype).copy_(torch.randn(outer, inner) * inner**-0.5)
            ours, theirs = (best_s(work, seconds) for work in (lambda: native.ops.linear(x, weight), lambda: x @ weight.T))  # noqa: B023
            flops = 2e-9 * rows * inner * outer
            print(
                f"{str(dtype).removeprefix('torch.'):>9} {rows:5} {inner:6} {outer:7} {flops / ours:8.1f} {flops / theirs:8.1f} "
                f"{theirs / ours:6.2f} {weight.nbytes / ours / 1e9:12.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
