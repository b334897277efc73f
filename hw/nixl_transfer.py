"""`KVTransfer` over NIXL and UCX, for pages in host memory or on a CUDA device (tried on one and between two of one host).

NIXL completes a write when it is flushed at the peer. The announcement is a notification of its own, sent only then: one that
rides on the write could not be withheld from a cancelled one. A peer is removed only after the last write to it is settled: removal
does not stop the bytes, it only hides their end (seen over TCP: a peer that was stopped got three quarters of a write after it).
What stops them is the end of the agent that they go to, for then their registration and its connections are gone; not where a process
of the same machine writes to this one's memory (seen with `process_vm_writev`: stopped, and let go on after that end, it wrote the rest).
Between processes of one machine UCX may copy inside `write` itself.

The library's own progress thread spins: it takes a core, idle or not (measured: 1.0 of one). Ours looks every `PROGRESS_S`, and not at
all where nothing is under way. Over RDMA the devices move the bytes; over TCP somebody has to look.
"""

import contextlib
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from hw.api import Unsupported
from hw.transfer import Part, WriteState

PROGRESS_S = 5e-4
_VERSION = 1
_MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}  # NIXL's names for what torch calls a device type


class _Region(msgspec.Struct, array_like=True, frozen=True):
    address: int
    page_bytes: int


class _Description(msgspec.Struct, array_like=True, frozen=True):
    version: int
    name: str
    memory: str
    device_idx: int
    num_pages: int
    regions: list[_Region]
    metadata: bytes  # NIXL's own


class NixlWrite:
    """See `hw.transfer.Write`."""

    def __init__(self, peer: str, part: Part, deadline_s: float, handle: Any):
        self.peer, self.part, self.deadline_s, self.handle = peer, part, deadline_s, handle
        self.state = WriteState.RUNNING
        self.settled = False

    def end(self, state: WriteState) -> None:
        """Take an end state, unless it has one."""
        if self.state is WriteState.RUNNING:
            self.state = state

    def cancel(self) -> None:
        """See `hw.transfer.Write`."""
        self.end(WriteState.CANCELLED)


class NixlTransfer:
    """See `hw.transfer.KVTransfer`. caches: contiguous tensors `[num_pages, ...]` of any dtype on one device, one a region.

    role: a readable beginning of the name. Raises Unsupported without NIXL or for pages on other devices than it knows, ValueError for
    caches that do not fit each other. What the library says about links goes to its own log.
    """

    def __init__(self, role: str, caches: Sequence[torch.Tensor]):
        _check(caches)
        try:
            import nixl
        except ImportError as error:
            raise Unsupported(f"moving pages between instances needs NIXL: pip install 'deepserve[pd]' ({error})") from error
        self.name = f"{role}-{uuid.uuid4().hex}"
        self._caches = list(caches)  # registered memory must outlive its registration
        self._num_pages = caches[0].shape[0]
        self._regions = [_Region(cache.data_ptr(), cache[0].numel() * cache.element_size()) for cache in caches]
        # The library's errors have no common ancestor of their own.
        named = (name for name in dir(nixl._bindings) if name.startswith("nixl") and name.endswith("Error"))
        self._errors: tuple[type[Exception], ...] = tuple(getattr(nixl._bindings, name) for name in named)
        self._memory, self._device_idx = _MEMORY[caches[0].device.type], caches[0].device.index or 0
        strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
        self._agent = nixl.nixl_agent(self.name, config)
        self._registered = self._agent.register_memory(self._caches)
        self._peers: dict[str, _Description] = {}
        self._writes: list[NixlWrite] = []  # unsettled
        self._leaving: set[str] = set()  # disconnected peers that the library still knows
        self._notes: deque[tuple[str, bytes]] = deque()  # that `poll` has yet to return
        self._fetching = threading.Lock()  # keeps the order of notes
        self._active, self._closed = threading.Event(), False
        self._active.set()
        self._progress = threading.Thread(target=self._look_now_and_then, name="nixl progress", daemon=True)
        self._progress.start()

    def set_active(self, active: bool) -> None:
        """See `hw.transfer.KVTransfer`."""
        if active != self._active.is_set():
            (self._active.set if active else self._active.clear)()

    def _look_now_and_then(self) -> None:
        while not self._closed:
            self._active.wait()
            with contextlib.suppress(*self._errors):
                self._fetch()
            time.sleep(PROGRESS_S)

    def _fetch(self) -> None:
        """Move bytes, and take the notes that have come."""
        with self._fetching:
            for peer, notes in self._agent.get_new_notifs().items():
                self._notes.extend((peer, note) for note in notes)

    def describe(self) -> bytes:
        """See `hw.transfer.KVTransfer`."""
        metadata = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(
            _Description(_VERSION, self.name, self._memory, self._device_idx, self._num_pages, self._regions, metadata)
        )

    def connect(self, description: bytes) -> str:
        """See `hw.transfer.KVTransfer`."""
        try:
            peer = msgspec.msgpack.decode(description, type=_Description)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{len(description)} bytes are no description of a peer's pages: {error}") from error
        if peer.version != _VERSION:
            raise ValueError(f"peer {peer.name!r} describes its pages in version {peer.version}, this is version {_VERSION}")
        ours, theirs = ([region.page_bytes for region in regions] for regions in (self._regions, peer.regions))
        if ours != theirs:
            raise ValueError(f"peer {peer.name!r} has pages of {theirs} bytes by region, these are of {ours}")
        if peer.name in self._peers:
            return peer.name
        self._remove_left()
        if peer.name in self._leaving:
            raise ValueError(f"peer {peer.name!r} was disconnected, and writes to it have yet to settle")
        try:
            known_as = self._agent.add_remote_agent(peer.metadata).decode()
        except self._errors as error:
            raise ValueError(f"peer {peer.name!r} cannot be reached: {error}") from error
        if known_as != peer.name:
            self._agent.remove_remote_agent(known_as)
            raise ValueError(f"peer {peer.name!r} comes with the metadata of {known_as!r}")
        self._peers[peer.name] = peer
        return peer.name

    def disconnect(self, peer: str) -> None:
        """See `hw.transfer.KVTransfer`."""
        if self._peers.pop(peer, None) is None:
            return
        for write in self._writes:
            if write.peer == peer:
                write.end(WriteState.FAILED)
        self._leaving.add(peer)

    def write(
        self, peer: str, part: Part, regions: Sequence[int], pages: Sequence[int], peer_pages: Sequence[int], deadline_s: float
    ) -> NixlWrite:
        """See `hw.transfer.KVTransfer`."""
        there = self._peers[peer]
        _check_numbers("region", regions, len(self._regions))
        _check_numbers("page", pages, self._num_pages)
        _check_numbers(f"page of peer {peer!r}", peer_pages, there.num_pages)
        if len(pages) != len(peer_pages):
            raise ValueError(f"{len(pages)} pages cannot go to {len(peer_pages)} pages of peer {peer!r}")
        write = NixlWrite(peer, part, deadline_s, None)
        self._writes.append(write)
        if regions and pages:
            firsts, peer_firsts, lengths = _runs(pages, peer_pages)
            source = _descriptors([self._regions[idx] for idx in regions], firsts, lengths, self._device_idx)
            target = _descriptors([there.regions[idx] for idx in regions], peer_firsts, lengths, there.device_idx)
            self._post(write, self._agent.get_xfer_descs(source, self._memory), self._agent.get_xfer_descs(target, there.memory))
        return write

    def _post(self, write: NixlWrite, source: Any, target: Any) -> None:
        try:
            write.handle = self._agent.initialize_xfer("WRITE", source, target, write.peer)
            self._agent.transfer(write.handle)
        except self._errors:
            self._settle(write, WriteState.FAILED)

    def poll(self) -> list[tuple[str, Part]]:
        """See `hw.transfer.KVTransfer`."""
        now_s = time.monotonic()
        for write in list(self._writes):
            if write.deadline_s <= now_s:
                write.end(WriteState.TIMED_OUT)
            self._advance(write)
        self._remove_left()
        self._fetch()
        arrived = []
        while self._notes:
            peer, note = self._notes.popleft()
            if (part := _decode(note)) is not None:
                arrived.append((peer, part))
        return arrived

    def _remove_left(self) -> None:
        """Have the library forget disconnected peers to which nothing is under way."""
        for peer in self._leaving - {write.peer for write in self._writes}:
            self._agent.remove_remote_agent(peer)
            self._leaving.remove(peer)

    def _advance(self, write: NixlWrite) -> None:
        """Settle a write that the library is done with, and announce it if it still counts."""
        try:
            status = "DONE" if write.handle is None else self._agent.check_xfer_state(write.handle)
            if status == "PROC":
                return
            if status == "DONE" and write.state is WriteState.RUNNING:
                self._agent.send_notif(write.peer, msgspec.msgpack.encode(write.part))
        except self._errors:
            status = "ERR"
        self._settle(write, WriteState.DONE if status == "DONE" else WriteState.FAILED)

    def _settle(self, write: NixlWrite, state: WriteState) -> None:
        write.end(state)
        write.settled = True
        self._writes.remove(write)
        if write.handle is not None:
            with contextlib.suppress(*self._errors):  # of a broken link
                self._agent.release_xfer_handle(write.handle)
            write.handle = None

    def close(self) -> None:
        """See `hw.transfer.KVTransfer`."""
        if self._closed:
            return
        self._closed = True
        self._active.set()
        self._progress.join()
        for peer in list(self._peers):
            self.disconnect(peer)
        self._writes.clear()
        self._agent.deregister_memory(self._registered)
        # What peers send over TCP is put in place by this agent, registered or not, until it is gone with its sockets.
        self._agent = None
        self._caches.clear()


def _runs(pages: Sequence[int], peer_pages: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pages that follow one another on both sides travel as one: first page here, first page there, number of pages, `[num_runs]` each."""
    here, there = np.asarray(pages, dtype=np.uint64), np.asarray(peer_pages, dtype=np.uint64)
    follows = (here[1:] == here[:-1] + np.uint64(1)) & (there[1:] == there[:-1] + np.uint64(1))
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return here[starts], there[starts], np.diff(np.append(starts, len(here))).astype(np.uint64)


def _descriptors(regions: list[_Region], firsts: np.ndarray, lengths: np.ndarray, device_idx: int) -> np.ndarray:
    """Address, bytes and device of each run of pages of each region: `[len(regions) * num_runs, 3]` uint64."""
    table = np.empty((len(regions), len(firsts), 3), dtype=np.uint64)
    for row, region in zip(table, regions, strict=True):
        row[:, 0] = firsts * np.uint64(region.page_bytes) + np.uint64(region.address)
        row[:, 1] = lengths * np.uint64(region.page_bytes)
        row[:, 2] = device_idx
    return table.reshape(-1, 3)


def _decode(note: bytes) -> Part | None:
    """A part; None for what is none, since anybody who reaches the port can send it."""
    try:
        return msgspec.msgpack.decode(note, type=Part)
    except msgspec.MsgspecError:
        return None


def _check(caches: Sequence[torch.Tensor]) -> None:
    if not caches or len({len(cache) for cache in caches}) != 1:
        raise ValueError(f"regions of one cache have one number of pages, not {[len(cache) for cache in caches]}")
    for cache in caches:
        if cache.device.type not in _MEMORY:
            raise Unsupported(f"nixl: pages in memory of {cache.device}")
        if cache.device != caches[0].device:
            raise ValueError(f"pages lie on {caches[0].device} and on {cache.device}")
        if not cache.is_contiguous():
            raise ValueError(f"pages of shape {list(cache.shape)} and strides {list(cache.stride())} are not one behind the other")


def _check_numbers(what: str, numbers: Sequence[int], end: int) -> None:
    wrong = [number for number in numbers if not 0 <= number < end]
    if wrong:
        raise ValueError(f"{what} {wrong[0]} is not one of the {end} that there are")
