"""Pages between engines of one process, moved when a test says so: bytes of a cancelled write may still arrive, as over a real link."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hw.transfer import Part, WriteState


@dataclass(eq=False)
class FakeWrite:
    """See `hw.transfer.Write`."""

    source: "FakeTransfer"
    peer: str
    part: Part
    regions: list[int]
    pages: list[int]
    peer_pages: list[int]
    deadline_s: float
    state: WriteState = WriteState.RUNNING
    settled: bool = False

    def end(self, state: WriteState) -> None:
        if self.state is WriteState.RUNNING:
            self.state = state

    def cancel(self) -> None:
        self.end(WriteState.CANCELLED)


class FakeNetwork:
    """All transfers, and the writes under way between them."""

    def __init__(self):
        self.now_s = 0.0
        self.writes: list[FakeWrite] = []
        self.transfers: dict[str, FakeTransfer] = {}
        self.copies_by_itself = False  # peers write to memory that nobody can refuse them, as those of one machine do

    def clock(self) -> float:
        return self.now_s

    def open(self, role: str, caches: list[torch.Tensor]) -> "FakeTransfer":
        name = role if role not in self.transfers else f"{role}-{len(self.transfers)}"
        transfer = self.transfers[name] = FakeTransfer(self, name, caches)
        return transfer

    def move(self, write: FakeWrite) -> None:
        """Its bytes arrive now, whatever has become of it."""
        there = self.transfers[write.peer]
        if there.closed and not self.copies_by_itself:
            self.fail(write)
            return
        for region in write.regions:
            there.caches[region][write.peer_pages] = write.source.caches[region][write.pages]
        if write.state is WriteState.RUNNING:
            there.arrived.append((write.source.name, write.part))
        write.end(WriteState.DONE)
        self._settle(write)

    def fail(self, write: FakeWrite) -> None:
        """The connection breaks."""
        write.end(WriteState.FAILED)
        self._settle(write)

    def _settle(self, write: FakeWrite) -> None:
        write.settled = True
        self.writes.remove(write)


class FakeTransfer:
    """See `hw.transfer.KVTransfer`."""

    def __init__(self, network: FakeNetwork, name: str, caches: list[torch.Tensor]):
        self.name, self.caches, self._network = name, caches, network
        self.arrived: deque[tuple[str, Part]] = deque()
        self.connected: set[str] = set()
        self.closed = False

    def describe(self) -> bytes:
        return self.name.encode()

    def connect(self, description: bytes) -> str:
        self.connected.add(description.decode())
        return description.decode()

    def disconnect(self, peer: str) -> None:
        self.connected.discard(peer)
        for write in self._network.writes:
            if write.source is self and write.peer == peer:
                write.end(WriteState.FAILED)

    def write(
        self, peer: str, part: Part, regions: Sequence[int], pages: Sequence[int], peer_pages: Sequence[int], deadline_s: float
    ) -> FakeWrite:
        assert peer in self.connected
        assert len(pages) == len(peer_pages)
        write = FakeWrite(self, peer, part, list(regions), list(pages), list(peer_pages), deadline_s)
        self._network.writes.append(write)
        return write

    def poll(self) -> list[tuple[str, Part]]:
        for write in self._network.writes:
            if write.source is self and write.deadline_s <= self._network.now_s:
                write.end(WriteState.TIMED_OUT)
        arrived = list(self.arrived)
        self.arrived.clear()
        return arrived

    def set_active(self, active: bool) -> None:
        pass

    def close(self) -> None:
        self.closed = True
