"""Runs small cases of every op on the GPU backend, for a memory checker to watch; results are not looked at (test_parity.py does that).

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/hw/memory_check.py [--cases 2]

Without torch's caching allocator every tensor is an allocation of its own, so a step beyond one is seen. The libraries' kernels run too.
Exits with 1 if a kernel of ours was not reached.
"""

import argparse
import pkgutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from hw.api import Activation, ExpertComm, ExpertMode, ExpertStep, Segments
from hw.groups import Group
from hw.quant import QuantTensor, quantize_weight_blocks
from hw.select import open_backend
from tests.hw.op_calls import TABLE, skips
from tests.hw.test_parity import to_device

# Ops whose later cases run other kernels: filters, splits, several queries.
EVERY_CASE = {"sample", "mla_decode", "mla_prefill", "latent_gather"}


def has_rows(args: tuple) -> bool:
    """Whether there is anything to compute."""
    return all(arg.numel() for arg in args if isinstance(arg, torch.Tensor))


def experts(opened) -> Iterator[Callable[[], object]]:
    """Dispatch and combine in both modes, dense and quantised; three tokens, and one of four experts gets none. On a GPU also the way
    through memory that ranks share, of one rank.
    """
    device, comms = opened.runtime.device, [(opened.expert_comm, mode) for mode in ExpertMode]
    if device.type == "cuda":
        from hw.cuda.peers import PeerExpertComm

        comms.append((PeerExpertComm(Group("alone", [0], 0, None), 4), ExpertMode.LOW_LATENCY))
    rows, norm = torch.randn(3, 256, device=device).bfloat16(), torch.ones(256, device=device).bfloat16()
    topk, weight = torch.tensor([[0, 2], [2, 3], [3, 0]], device=device), torch.rand(3, 2, device=device)

    def run(comm: ExpertComm, mode: ExpertMode, quant: bool) -> None:
        x, _ = opened.ops.add_rms_norm(rows, rows, norm, 1e-6, True, quant)
        sent = comm.dispatch(x if quant else Activation(x.dense), topk, weight, ExpertStep(mode, 3), 4)
        y = torch.zeros(*sent.x.shape[:-1], 256, device=device, dtype=torch.bfloat16)
        comm.combine(y, weight, sent, rows)

    for comm, mode in comms:
        for quant in (False, True):
            yield lambda comm=comm, mode=mode, quant=quant: run(comm, mode, quant)


def products(opened) -> Iterator[Callable[[], object]]:
    """Products of few and more rows, in FP8 and bf16, and V3's heads around attention."""
    ops, device = opened.ops, opened.runtime.device

    def weight(*shape: int) -> QuantTensor:
        return to_device(quantize_weight_blocks(torch.randn(shape)), device)

    linear, grouped, counts = weight(2112, 7168), weight(3, 512, 1024), torch.tensor([1, 0, 2], dtype=torch.int32, device=device)
    for num_rows in (1, 3, 12, 40):
        x = torch.randn(num_rows, 7168, device=device).bfloat16()
        yield lambda x=x: ops.linear(x, linear)
        masked = torch.randn(3, max(3, num_rows), 1024, device=device).bfloat16()
        yield lambda masked=masked: ops.silu_mul(ops.grouped_linear_masked(masked, grouped, counts), True, counts)
    dense = torch.randn(102, 2816, device=device).bfloat16()  # tiles of 4 and of 16 rows have some too many
    for num_rows in (1, 3):
        yield lambda num_rows=num_rows: ops.linear(torch.randn(num_rows, 2816, device=device).bfloat16(), dense)
    gate = torch.randn(256, 7168, device=device)
    for num_rows in (1, 40):
        yield lambda num_rows=num_rows: ops.gate_logits(torch.randn(num_rows, 7168, device=device).bfloat16(), gate)
    query, key = (torch.randn(70, 2, 192, device=device).bfloat16() for _ in range(2))
    value, segments = (
        torch.randn(70, 2, 128, device=device).bfloat16(),
        Segments([40, 30], torch.tensor([0, 40, 70], dtype=torch.int32, device=device)),
    )
    for causal in (True, False):
        yield lambda causal=causal: ops.mla_prefill(query, key, value, segments, segments, 0.07, causal)
    q, positions = torch.randn(3, 128, 192, device=device).bfloat16(), torch.arange(3, device=device)
    table, up = torch.rand(9, 64, device=device), torch.randn(128, 256, 512, device=device).bfloat16()
    yield lambda: ops.absorb_query(q, positions, table, up[:, :128])
    for quant in (False, True):
        yield lambda quant=quant: ops.unabsorb(torch.randn(3, 128, 512, device=device).bfloat16(), up[:, 128:], quant)


def our_kernels() -> set[str]:
    """Names of the kernels that hw/cuda launches on one GPU."""
    import hw.cuda

    names = {
        f"hw.cuda.{module.name}"
        for module in pkgutil.iter_modules(hw.cuda.__path__)
        if module.name not in ("deep_ep", "triton_ranks", "nccl", "backend")
    }
    members = (member for name in sorted(names) for member in vars(import_module(name)).values())
    return {member.__name__ for member in members if hasattr(member, "arg_names") and member.__name__.endswith("_kernel")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2, help="of each op and dtype, the first that have rows")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    opened = open_backend(args.device)
    reached: set[str] = set()
    if args.device == "cuda":
        import triton

        triton.knobs.runtime.launch_enter_hook.add(lambda metadata: reached.add(metadata.get()["name"]))
    num_calls = 0
    for op, make in TABLE.items():
        for dtype in (torch.float32, torch.bfloat16):
            if skips(op, dtype):
                continue
            cases = (case for case in make(dtype) if has_rows(case[1].args))
            for _, call in cases if op in EVERY_CASE else islice(cases, args.cases):
                getattr(opened.ops, op)(*(to_device(arg, opened.runtime.device) for arg in call.args))
                opened.runtime.synchronize()
                num_calls += 1
    for run in (*experts(opened), *products(opened)):
        run()
        opened.runtime.synchronize()
        num_calls += 1
    print(f"{num_calls} calls, {len(reached)} kernels of ours")
    if args.device == "cuda" and (missed := our_kernels() - reached):
        sys.exit(f"not reached: {', '.join(sorted(missed))}")


if __name__ == "__main__":
    main()
