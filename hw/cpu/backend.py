"""The CPU backend: what a laptop runs, and the reference for every other backend."""

import logging
from functools import partial

import torch

from hw.api import Backend, ExpertComm, Ops, Unsupported
from hw.cpu.ep_comm import GlooExpertComm
from hw.cpu.expert_comm import LocalExpertComm
from hw.cpu.guess_head import NativeGuessHead
from hw.cpu.invariant import InvariantOps
from hw.cpu.native import Kernels, NoKernels, open_kernels
from hw.cpu.native_experts import NativeExpertComm
from hw.cpu.native_ops import NativeInvariantOps, NativeOps
from hw.cpu.native_rows import NativeRows
from hw.cpu.ops import CpuOps
from hw.cpu.recording import Recorder
from hw.cpu.runtime import CpuRuntime
from hw.groups import Groups
from hw.moves import ExpertMoves

logger = logging.getLogger(__name__)


def open_cpu(
    groups: Groups,
    *,
    batch_invariant: bool,
    max_dispatch_tokens_per_rank: int,
    num_threads: int | None,
    kernel_cache_dir: str | None,
    cpu_kernels: str,
) -> Backend:
    """One rank on this machine's CPU. `num_threads` sets torch's thread count of the process.

    cpu_kernels: "native" compiles and loads those of `csrc/`, "torch" does without, "auto" is native where that works. Raises Unsupported
    where it does not and "native" is asked for.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    kernels = _open_kernels(kernel_cache_dir, cpu_kernels)
    comm: ExpertComm
    if groups.ep.size > 1 or groups.rendezvous is not None:  # or may become more
        comm = GlooExpertComm(groups.ep, max_dispatch_tokens_per_rank)
    elif kernels is not None:
        comm = NativeExpertComm(max_dispatch_tokens_per_rank, kernels)
    else:
        comm = LocalExpertComm(max_dispatch_tokens_per_rank)
    # Of a few cores and gloo on one machine, roughly.
    moves = ExpertMoves(groups.ep, node_bytes_per_s=1e9, network_bytes_per_s=1e9, expert_flops_per_s=20e9)
    ops: Ops
    if kernels is None:
        ops = InvariantOps() if batch_invariant else CpuOps()
    else:
        ops = NativeInvariantOps(kernels) if batch_invariant else NativeOps(kernels)
    # What goes through gloo is in no recording.
    recorder = Recorder(kernels) if isinstance(comm, NativeExpertComm) and groups.tp.size == 1 else None
    rows = None if kernels is None else NativeRows(kernels)
    runtime = CpuRuntime(recorder)
    # AVX2 has no instruction for it.
    guess_head = partial(NativeGuessHead, kernels, runtime.empty) if kernels is not None and kernels.target == "AVX512-BF16" else None
    return Backend(name="cpu", ops=ops, runtime=runtime, expert_comm=comm, tp=groups.tp, moves=moves, rows=rows, guess_head=guess_head)


def _open_kernels(kernel_cache_dir: str | None, cpu_kernels: str) -> Kernels | None:
    if cpu_kernels == "torch":
        return None
    try:
        kernels = open_kernels(kernel_cache_dir)
    except NoKernels as error:
        if cpu_kernels == "native":
            raise Unsupported(f"cpu: there are no native kernels: {error}") from None
        logger.warning("CPU kernels: torch, since the native ones are not to be had: %s", error)
        return None
    logger.info("CPU kernels: native, for %s, %s", kernels.target, kernels.path)
    return kernels
