"""How long one rank's routed experts take as a function of the rows they get, on one GPU: the slope is what an unbalanced rank costs.

    PYTHONPATH=. python bench/gpu/expert_rows.py [--json FILE]

DeepSeek-V3's experts in FP8 (7168 x 2048), activations already quantised, as a dispatch in FP8 delivers them: gate and up product, SwiGLU
with quantisation, down product. Slots and layouts of three instances: 144 ranks with 2 slots and 320 with 1 (decode: masked layout, in a
graph, several sets of weights so that the L2 cache does not help), 32 ranks with 9 (prefill: contiguous layout). Also the 8 experts of
bench/gpu/decode_slice.py, to tell from its step what is not experts: with as many rows each, and with what they get if 8 of 16 experts are
chosen at random on two GPUs; `expected` is the hint that DeepGEMM chooses its kernels by. Medians.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from hw.api import ExpertRows, Ops
from hw.cuda.quantize import quantize, quantize_masked
from hw.quant import QuantTensor
from hw.select import open_backend

HIDDEN, INNER, DEVICE = 7168, 2048, torch.device("cuda")
MASKED_ROWS = (64, 256, 512, 768, 1024, 2048, 4096)
CONTIGUOUS_ROWS = (1024, 4096, 8192)


def weights(num_experts: int) -> tuple[QuantTensor, QuantTensor]:
    """gate_up and down at the scale of real ones."""

    def one(outer: int, inner: int) -> QuantTensor:
        data = torch.randn(num_experts, outer, inner, device=DEVICE).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
        return QuantTensor(data, torch.rand(num_experts, outer // 128, inner // 128, device=DEVICE) * inner**-0.5 / 100)

    return one(2 * INNER, HIDDEN), one(HIDDEN, INNER)


def masked(
    ops: Ops, num_experts: int, num_rows: int, capacity: int, expected: int | None = None, uneven: bool = False
) -> Callable[[], object]:
    gate_up, down = weights(num_experts)
    counts = torch.full((num_experts,), num_rows, dtype=torch.int32, device=DEVICE)
    if uneven:
        counts = torch.binomial(2.0 * counts, torch.full_like(counts, 0.5, dtype=torch.float32)).int()
    x = quantize_masked(torch.randn(num_experts, capacity, HIDDEN, device=DEVICE, dtype=torch.bfloat16), counts)

    def run() -> object:
        inner = ops.silu_mul(ops.grouped_linear_masked(x, gate_up, counts, expected), True, counts)
        return ops.grouped_linear_masked(inner, down, counts, expected)

    return run


def contiguous(ops: Ops, num_experts: int, num_rows: int) -> Callable[[], object]:
    gate_up, down = weights(num_experts)
    assert num_rows % 128 == 0
    experts = torch.arange(num_experts, dtype=torch.int32, device=DEVICE).repeat_interleave(num_rows)
    layout = ExpertRows([num_rows] * num_experts, 128, experts)
    x = quantize(torch.randn(num_experts * num_rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16))
    return lambda: ops.grouped_linear(ops.silu_mul(ops.grouped_linear(x, gate_up, layout), True), down, layout)


def microseconds(calls: list[Callable[[], object]], *, graph: bool) -> float:
    """Of one call."""

    def all_calls() -> None:
        for call in calls:
            call()

    all_calls()
    torch.cuda.synchronize()
    replay: Callable[[], object] = all_calls
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            all_calls()
        replay = captured.replay
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    ops = open_backend("cuda", max_dispatch_tokens_per_rank=128).ops
    rows: list[dict[str, object]] = []
    for num_experts, several in ((2, MASKED_ROWS), (1, MASKED_ROWS), (8, (128,))):
        for num_rows in several:
            calls = [masked(ops, num_experts, num_rows, MASKED_ROWS[-1]) for _ in range(max(1, 6 // num_experts))]
            rows.append({"layout": "masked", "slots": num_experts, "rows": num_rows, "us": microseconds(calls, graph=True)})
            print(rows[-1], flush=True)
    for num_rows in (128, 256):
        for uneven in (False, True):
            for expected in (num_rows, num_rows + num_rows // 8):
                calls = [masked(ops, 8, num_rows, 512, expected, uneven) for _ in range(4)]
                rows.append({"layout": "masked", "slots": 8, "rows": num_rows, "uneven": uneven, "expected": expected})
                rows[-1]["us"] = microseconds(calls, graph=True)
                print(rows[-1], flush=True)
    for num_rows in CONTIGUOUS_ROWS:
        calls = [contiguous(ops, 9, num_rows)]
        rows.append({"layout": "contiguous", "slots": 9, "rows": num_rows, "us": microseconds(calls, graph=False)})
        print(rows[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps({"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
