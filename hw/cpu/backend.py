"""The CPU backend: what a laptop runs, and the reference for every other backend."""

import torch

from hw.api import Backend, ExpertComm
from hw.cpu.ep_comm import GlooExpertComm
from hw.cpu.expert_comm import LocalExpertComm
from hw.cpu.invariant import InvariantOps
from hw.cpu.ops import CpuOps
from hw.cpu.runtime import CpuRuntime
from hw.groups import Groups
from hw.moves import ExpertMoves


def open_cpu(groups: Groups, *, batch_invariant: bool, max_dispatch_tokens_per_rank: int, num_threads: int | None) -> Backend:
    """One rank on this machine's CPU. `num_threads` sets torch's thread count of the process."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    ops = InvariantOps() if batch_invariant else CpuOps()
    if groups.ep.size == 1:
        comm: ExpertComm = LocalExpertComm(max_dispatch_tokens_per_rank)
    else:
        comm = GlooExpertComm(groups.ep, max_dispatch_tokens_per_rank)
    # Of a few cores and gloo on one machine, roughly.
    moves = ExpertMoves(groups.ep, node_bytes_per_s=1e9, network_bytes_per_s=1e9, expert_flops_per_s=20e9)
    return Backend(name="cpu", ops=ops, runtime=CpuRuntime(), expert_comm=comm, tp=groups.tp, moves=moves)
