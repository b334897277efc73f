"""Runs small cases of every op on the GPU backend, for a memory checker to watch; results are not looked at (test_parity.py does that).

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/hw/memory_check.py [--cases 2]

Without torch's caching allocator every tensor is an allocation of its own, so a step beyond one is seen. The libraries' kernels run too.
"""

import argparse
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from hw.api import Activation, ExpertMode, ExpertStep
from hw.select import open_backend
from tests.hw.test_parity import FP32_ONLY, TABLE, to_device


def has_rows(args: tuple) -> bool:
    """Whether there is anything to compute."""
    return all(arg.numel() for arg in args if isinstance(arg, torch.Tensor))


def experts(opened) -> list[Callable[[], None]]:
    """Dispatch and combine in both modes, dense and quantised; three tokens of which one expert gets none."""
    device = opened.runtime.device

    def run(mode: ExpertMode, quant: bool) -> None:
        rows = torch.randn(3, 256, device=device, dtype=torch.bfloat16)
        norm = torch.ones(256, device=device, dtype=torch.bfloat16)
        x, _ = opened.ops.add_rms_norm(rows, rows, norm, 1e-6, True, quant)
        topk = torch.tensor([[0, 2], [2, 3], [3, 0]], device=device)
        weight = torch.rand(3, 2, device=device)
        sent = opened.expert_comm.dispatch(x if quant else Activation(x.dense), topk, weight, ExpertStep(mode, 3), 4)
        y = torch.zeros(*sent.x.shape[:-1], 256, device=device, dtype=torch.bfloat16)
        opened.expert_comm.combine(y, weight, sent, rows)

    return [lambda mode=mode, quant=quant: run(mode, quant) for mode in ExpertMode for quant in (False, True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2, help="of each op and dtype, the first that have rows")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    opened = open_backend(args.device)
    num_calls = 0
    for op, make in TABLE.items():
        for dtype in (torch.float32, torch.bfloat16):
            if op in FP32_ONLY and dtype != torch.float32:
                continue
            for _, call in islice((case for case in make(dtype) if has_rows(case[1].args)), args.cases):
                getattr(opened.ops, op)(*(to_device(arg, opened.runtime.device) for arg in call.args))
                opened.runtime.synchronize()
                num_calls += 1
    for run in experts(opened):
        run()
        opened.runtime.synchronize()
        num_calls += 1
    print(f"{num_calls} calls")


if __name__ == "__main__":
    main()
