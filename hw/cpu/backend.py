"""The CPU backend: what a laptop runs, and the reference for every other backend."""

import logging

import torch

from hw.api import Backend, ExpertComm, Ops, Unsupported
from hw.cpu.ep_comm import GlooExpertComm
from hw.cpu.expert_comm import LocalExpertComm
from hw.cpu.invariant import InvariantOps
from hw.cpu.native import NoKernels, open_kernels
from hw.cpu.native_ops import NativeInvariantOps, NativeOps
from hw.cpu.ops import CpuOps
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
    if groups.ep.size == 1 and groups.rendezvous is None:  # and never more
        comm: ExpertComm = LocalExpertComm(max_dispatch_tokens_per_rank)
    else:
        comm = GlooExpertComm(groups.ep, max_dispatch_tokens_per_rank)
    # Of a few cores and gloo on one machine, roughly.
    moves = ExpertMoves(groups.ep, node_bytes_per_s=1e9, network_bytes_per_s=1e9, expert_flops_per_s=20e9)
    ops = _open_ops(batch_invariant, kernel_cache_dir, cpu_kernels)
    return Backend(name="cpu", ops=ops, runtime=CpuRuntime(), expert_comm=comm, tp=groups.tp, moves=moves)


def _open_ops(batch_invariant: bool, kernel_cache_dir: str | None, cpu_kernels: str) -> Ops:
    if cpu_kernels != "torch":
        try:
            kernels = open_kernels(kernel_cache_dir)
            logger.info("CPU kernels: native, for %s, %s", kernels.target, kernels.path)
            return NativeInvariantOps(kernels) if batch_invariant else NativeOps(kernels)
        except NoKernels as error:
            if cpu_kernels == "native":
                raise Unsupported(f"cpu: there are no native kernels: {error}") from None
            logger.warning("CPU kernels: torch, since the native ones are not to be had: %s", error)
    return InvariantOps() if batch_invariant else CpuOps()
