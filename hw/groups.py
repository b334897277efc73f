"""Groups of ranks of one instance, over gloo, built from a topology and passed explicitly.

They carry control messages on every backend and, on CPU, the data too; other backends open groups of their own for that. Nothing here
touches torch's default process group, so an engine can live inside a training job that has its own. Whatever goes wrong with a peer is
a `PeerLost`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from hw.topology import ParallelConfig


class PeerLost(RuntimeError):
    """A collective failed: a peer died, or did not take part within the timeout."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of an instance meet, and how they reach each other."""

    store: Any  # torch.distributed.Store; lives in a process that no rank's death takes along
    timeout_s: float  # of every collective until `set_timeout`: the longest that a peer may be late
    address: str = "127.0.0.1"  # of this rank, as its peers reach it: collectives listen there and nowhere else


class Group:
    """Some ranks, in a fixed order. A group of one talks to nobody."""

    def __init__(self, name: str, ranks: list[int], rank: int, rendezvous: Rendezvous | None):
        """Collective over `ranks`; `rank` is this process's, and one of them. Raises PeerLost."""
        self.open(name, ranks, rank, rendezvous)

    def open(self, name: str, ranks: list[int], rank: int, rendezvous: Rendezvous | None) -> None:
        """Become a group of these ranks; whoever has this object goes on with them."""
        self.name, self.ranks, self.rank, self.size = name, ranks, ranks.index(rank), len(ranks)
        self.timeout_s = 0.0  # longest that a peer may be late
        self._comm: Any = None
        if self.size > 1:
            assert rendezvous is not None, f"group {name} of {self.size} ranks without a rendezvous"
            self.timeout_s = rendezvous.timeout_s
            try:
                self._comm = self._open(rendezvous)
            except RuntimeError as error:
                raise PeerLost(f"group {name!r} of {self.size} ranks did not come together: {str(error).splitlines()[0]}") from error

    def _open(self, rendezvous: Rendezvous) -> Any:
        """The torch process group that carries the data."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=rendezvous.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=rendezvous.address)]
        return dist.ProcessGroupGloo(dist.PrefixStore(self.name, rendezvous.store), self.rank, self.size, options)

    def close(self) -> None:
        """Hang up: peers that wait for this rank lose it at once."""
        self._comm = None

    def set_timeout(self, timeout_s: float) -> None:
        """From now on a peer may be this late; every rank of the group says so at the same point."""
        if self._comm is not None:
            self.timeout_s = timeout_s
            self._comm._set_default_timeout(timedelta(seconds=timeout_s))

    def all_gather_ints(self, values: list[int]) -> list[list[int]]:
        """The same number of integers from every rank, in rank order."""
        if self.size == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._run(lambda: self._comm.allgather([found], [mine]))
        return [row.tolist() for row in found]

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """`data` of the root, on every rank; the others pass None."""
        if self.size == 1:
            assert data is not None
            return data
        num = self.broadcast(torch.tensor([0 if data is None else len(data)]), root)
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(num), dtype=torch.uint8)
        return self.broadcast(buffer, root).numpy().tobytes() if int(num) else b""

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """The root's contiguous tensor, in place. Any dtype: the wire carries bytes."""
        if self.size > 1 and tensor.numel():
            options = in_order(dist.BroadcastOptions())
            options.rootRank = root
            wire = tensor.view(-1).view(torch.uint8)
            self._run(lambda: self._comm.broadcast([wire], options))
        return tensor

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Send `send[i]` rows of x `[sum(send), ...]` to rank i; the result holds `receive[i]` rows of each rank, in rank order.

        Any dtype: the wire carries bytes.
        """
        if self.size == 1:
            return x
        row_bytes = prod(x.shape[1:]) * x.element_size()
        wire_in = x.contiguous().flatten().view(torch.uint8)
        wire_out = torch.empty(sum(receive) * row_bytes, dtype=torch.uint8, device=x.device)
        splits = [[n * row_bytes for n in receive], [n * row_bytes for n in send]]
        self._run(lambda: self._comm.alltoall_base(wire_out, wire_in, *splits, in_order(dist.AllToAllOptions())))
        return wire_out.view(x.dtype).view(sum(receive), *x.shape[1:])

    def all_gather_rows(self, x: torch.Tensor, lens: list[int]) -> torch.Tensor:
        """x `[lens[rank], ...]` of every rank -> `[sum(lens), ...]`, in rank order."""
        if self.size == 1:
            return x
        return self.all_to_all(x.repeat(self.size, *[1] * (x.dim() - 1)), [x.shape[0]] * self.size, lens)

    def reduce_scatter_rows(self, x: torch.Tensor, lens: list[int]) -> torch.Tensor:
        """x `[sum(lens), D]` -> this rank's rows of the sum over ranks, added in fp32 in rank order."""
        if self.size == 1:
            return x
        mine = lens[self.rank]
        parts = self.all_to_all(x, lens, [mine] * self.size).view(self.size, mine, *x.shape[1:])
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def gather_columns(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """x `[R, widths[rank]]` of every rank side by side at rank 0: `[R, sum(widths)]`; None elsewhere."""
        if self.size == 1:
            return x
        others = [0] * (self.size - 1)
        columns = x.T.contiguous()  # rows of the transpose travel
        found = self.all_to_all(columns, [columns.shape[0], *others], widths if self.rank == 0 else [0, *others])
        return found.T.contiguous() if self.rank == 0 else None

    def barrier(self) -> None:
        self.all_gather_ints([0])

    def _run(self, start: Callable[[], Any]) -> None:
        try:
            work = start()
            if work is not None:  # on a device it is queued
                work.wait()
        except RuntimeError as error:
            raise PeerLost(f"group {self.name!r}: {str(error).splitlines()[0]}") from error


def in_order(options: Any) -> Any:
    """Options of a call that a device runs on its current stream, behind what is queued there."""
    options.asyncOp = False
    return options


@dataclass
class Groups:
    """The groups of one rank. Which ranks are in them may change (`reopen`); the group objects stay the same."""

    parallel: ParallelConfig
    rank: int  # by which its peers know it
    world: Group  # all ranks: votes and other control
    tp: Group  # ranks that share this rank's attention
    ep: Group  # all ranks: tokens to experts and back
    rendezvous: Rendezvous | None = None  # for groups that a backend opens; None if the rank is alone

    @property
    def is_leader(self) -> bool:
        """Whether this rank schedules for its TP group."""
        return self.tp.rank == 0

    @property
    def dp_rank(self) -> int:
        """Which of the DP replicas this rank belongs to."""
        return self.parallel.place(self.rank).dp

    def set_timeout(self, timeout_s: float) -> None:
        """From now on a peer may be this late in any of the groups."""
        for group in (self.world, self.tp, self.ep):
            group.set_timeout(timeout_s)

    def close(self) -> None:
        """Hang up in all groups."""
        for group in (self.world, self.tp, self.ep):
            group.close()

    def reopen(self, parallel: ParallelConfig, rank: int, rendezvous: Rendezvous) -> None:
        """Closed groups become those of another set of ranks, in which this one is `rank`. Collective over them; raises PeerLost."""
        self.parallel, self.rank = parallel, rank
        for group, (name, ranks) in zip((self.world, self.tp, self.ep), _members(parallel, rank), strict=True):
            group.open(name, ranks, rank, rendezvous)


def open_groups(parallel: ParallelConfig, rank: int, rendezvous: Rendezvous | None = None) -> Groups:
    """Collective over all ranks of the instance. Raises PeerLost."""
    world, tp, ep = (Group(name, ranks, rank, rendezvous) for name, ranks in _members(parallel, rank))
    return Groups(parallel=parallel, rank=rank, world=world, tp=tp, ep=ep, rendezvous=rendezvous)


def _members(parallel: ParallelConfig, rank: int) -> list[tuple[str, list[int]]]:
    """Name and ranks of each group of a rank: world, tp, ep."""
    everyone, dp = list(range(parallel.num_ranks)), parallel.place(rank).dp
    return [("world", everyone), (f"tp{dp}", parallel.tp_group(dp)), ("ep", everyone)]
