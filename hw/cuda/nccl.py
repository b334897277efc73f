"""Groups of ranks over NCCL: the collectives of `hw.groups.Group` on tensors of the GPU.

Calls queue work and return; what they give back is ready for whatever is queued later. All of them can be captured once a first call has
set the connections up, which opening the group does. A peer that dies or stands still is not noticed here: it shows where the host waits
for the device (`CudaRuntime.download`), or in the next vote. Control messages stay with gloo.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from hw.cuda.launch import cdiv
from hw.cuda.triton_ranks import sum_parts_kernel
from hw.groups import Group, Rendezvous, in_order

# NCCL's own watchdog would end the process without a word; waits on the host have a deadline instead.
WATCHDOG = timedelta(days=7)
_BLOCK = 2048


class NcclGroup(Group):
    """Some ranks, each with a GPU of its own: the current one."""

    def _open(self, rendezvous: Rendezvous) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = WATCHDOG
        store = dist.PrefixStore(f"nccl {self.name}", rendezvous.store)
        comm = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        # Connections are made at first use, which must not be while a graph is recorded.
        first = torch.zeros(self.size, dtype=torch.uint8, device="cuda")
        even = [1] * self.size
        comm.alltoall_base(torch.empty_like(first), first, even, even, in_order(dist.AllToAllOptions()))
        comm.broadcast([first], in_order(dist.BroadcastOptions()))
        comm._allgather_base(torch.empty(self.size**2, dtype=torch.uint8, device="cuda"), first, in_order(AllgatherOptions()))
        torch.cuda.synchronize()
        return comm

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def all_gather_rows(self, x: torch.Tensor, lens: list[int]) -> torch.Tensor:
        if self.size == 1 or not sum(lens):
            return x
        most = max(lens)
        if x.shape[0] < most:  # the call takes as many rows from everyone
            x = torch.cat((x, x.new_zeros(most - x.shape[0], *x.shape[1:])))
        wire = torch.empty((self.size * most, *x.shape[1:]), dtype=x.dtype, device=x.device)
        self._run(lambda: self._comm._allgather_base(_bytes(wire), _bytes(x.contiguous()), in_order(AllgatherOptions())))
        if min(lens) == most:
            return wire
        return torch.cat([part[:num] for part, num in zip(wire.chunk(self.size), lens, strict=True)])

    def reduce_scatter_rows(self, x: torch.Tensor, lens: list[int]) -> torch.Tensor:
        if self.size == 1:
            return x
        mine = lens[self.rank]
        parts = self.all_to_all(x, lens, [mine] * self.size)
        out = torch.empty((mine, *x.shape[1:]), dtype=x.dtype, device=x.device)
        if out.numel():
            sum_parts_kernel[(cdiv(out.numel(), _BLOCK),)](parts, out, out.numel(), PARTS=self.size, BLOCK=_BLOCK)
        return out

    def gather_columns(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        if self.size == 1:
            return x
        num_rows, nobody = x.shape[0], [0] * (self.size - 1)
        receive = [num_rows * width for width in widths] if self.rank == 0 else [0, *nobody]
        found = self.all_to_all(x.reshape(-1), [x.numel(), *nobody], receive)
        if self.rank:
            return None
        return torch.cat([part.view(num_rows, width) for part, width in zip(found.split(receive), widths, strict=True)], 1)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
