"""How pages of a paged cache travel between instances: the contract, and what both sides count. Bytes only, no layouts, no torch.

A cache is a list of *regions*, one for each cached tensor of each layer, all with the same number of pages. One side writes its pages
into pages that the other has set aside, in *parts* (chunks of a prompt, layer shares of TP ranks), and each part is announced when it is
in place. An *epoch* is one attempt at a hand-off: a retry has a new one, so a late part of the old cannot count for it.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec


class Part(msgspec.Struct, array_like=True, frozen=True):
    """What a notification says: this part of that attempt is in place. `idx` counts each writer's parts from 0."""

    transfer: str
    epoch: int
    writer: int
    idx: int
    is_last: bool


class WriteState(StrEnum):
    """How a write stands. Only RUNNING changes, and only once."""

    RUNNING = "running"
    DONE = "done"  # all bytes are in place at the peer and the part is announced
    FAILED = "failed"  # the connection broke; the part may be in place, but its announcement did not go out
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


class Write(Protocol):
    """One part on its way. Time passes for it inside `KVTransfer.poll` alone."""

    peer: str
    part: Part
    state: WriteState
    settled: bool  # the library has let go of it: every byte is in place, or the connection broke

    def cancel(self) -> None:
        """Never announce it; nothing if it has ended. Bytes may go on arriving until it is `settled`, for nothing can call them back."""


class KVTransfer(Protocol):
    """This rank's end of all transfers. Used from one thread; bytes move meanwhile."""

    name: str  # unique among all processes, also those that come back under an old role

    def describe(self) -> bytes:
        """Where this rank's pages are, for `connect` of a peer. Goes over an authenticated socket: who has it can write to them."""

    def connect(self, description: bytes) -> str:
        """Learn a peer's pages; its name. Raises ValueError if its regions differ from ours or the description is not one, and for a peer
        that was disconnected as long as a write to it is not settled.
        """

    def disconnect(self, peer: str) -> None:
        """Write no more to a peer, known or not; running writes to it have FAILED. Their bytes go on until they are settled."""

    def write(
        self, peer: str, part: Part, regions: Sequence[int], pages: Sequence[int], peer_pages: Sequence[int], deadline_s: float
    ) -> Write:
        """Start to copy `pages` of each region to the peer's `peer_pages`, in order, and announce `part` once all are in place.

        What computes the pages is done by now, and they stay as they are until the write is settled. Nothing to copy is a part too.
        deadline_s: on `time.monotonic`; past it a write has TIMED_OUT, whatever the library thinks of the link.
        Raises ValueError for page or region numbers that are not there; KeyError for a peer that is not connected.
        """

    def poll(self) -> list[tuple[str, Part]]:
        """Advance all writes; parts that peers announced since the last call, and by whom. Never waits."""

    def set_active(self, active: bool) -> None:
        """Whether parts are expected or under way, as at first. While they are not, nothing moves but in `poll`, and nothing costs time."""

    def close(self) -> None:
        """Disconnect all peers and give up the registration of the pages.

        Writes of peers that are under way have no effect from then on, except those that a process of this machine does by itself:
        it copies from memory to memory, or between GPUs, as long as it runs.
        """


def layer_share(num_regions: int, rank: int, size: int) -> range:
    """Regions that TP rank `rank` of `size` sends: the latent is the same on all, so each sends a part. Shares differ by one at most."""
    return range(num_regions * rank // size, num_regions * (rank + 1) // size)


class Receipt:
    """Counts the parts of one attempt at the side that receives. Parts may come in any order and twice."""

    def __init__(self, transfer: str, epoch: int, num_writers: int):
        self.transfer, self.epoch, self.num_writers = transfer, epoch, num_writers
        self._seen: list[set[int]] = [set() for _ in range(num_writers)]
        self._num_parts: list[int | None] = [None] * num_writers  # known from each writer's last part

    def add(self, part: Part) -> bool:
        """Count a part; False if it is of another transfer or attempt, or of a writer that there is not."""
        if (part.transfer, part.epoch) != (self.transfer, self.epoch) or not 0 <= part.writer < self.num_writers:
            return False
        self._seen[part.writer].add(part.idx)
        if part.is_last:
            self._num_parts[part.writer] = part.idx + 1
        return True

    @property
    def complete(self) -> bool:
        """Whether every part of every writer is there."""
        return all(seen == set(range(num or 0)) and num for seen, num in zip(self._seen, self._num_parts, strict=True))
