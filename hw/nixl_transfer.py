"""`KVTransfer` over NIXL and UCX, for pages in host memory.

NIXL completes a write when it is flushed at the peer. The announcement is a notification of its own, sent only then: one that
rides on the write could not be withheld from a cancelled one. A peer is removed only after the last write to it is settled: removal
does not stop the bytes, it only hides their end (seen over TCP: a peer that was stopped got three quarters of a write after it).
Between processes of one machine UCX may copy inside `write` itself.
"""

import contextlib
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from hw.api import Unsupported
from hw.transfer import Part, WriteState

_VERSION = 1


class _Region(msgspec.Struct, array_like=True, frozen=True):
    address: int
    page_bytes: int


class _Description(msgspec.Struct, array_like=True, frozen=True):
    version: int
    name: str
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
    """See `hw.transfer.KVTransfer`. caches: contiguous tensors `[num_pages, ...]` of any dtype on the host, one a region.

    role: a readable beginning of the name. Raises Unsupported without NIXL or for pages on a device, ValueError for caches that do not fit
    each other. What the library says about links goes to its own log.
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
        self._agent = nixl.nixl_agent(self.name, nixl.nixl_agent_config(backends=["UCX"]))
        self._registered = self._agent.register_memory(self._caches)
        self._peers: dict[str, _Description] = {}
        self._writes: list[NixlWrite] = []  # unsettled
        self._leaving: set[str] = set()  # disconnected peers that the library still knows

    def describe(self) -> bytes:
        """See `hw.transfer.KVTransfer`."""
        metadata = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(_Description(_VERSION, self.name, self._num_pages, self._regions, metadata))

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
            source = _descriptors([self._regions[idx] for idx in regions], pages)
            target = _descriptors([there.regions[idx] for idx in regions], peer_pages)
            self._post(write, source, target)
        return write

    def _post(self, write: NixlWrite, source: np.ndarray, target: np.ndarray) -> None:
        lists = (self._agent.get_xfer_descs(array, "DRAM") for array in (source, target))
        try:
            write.handle = self._agent.initialize_xfer("WRITE", *lists, write.peer)
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
        for peer in self._leaving - {write.peer for write in self._writes}:
            self._agent.remove_remote_agent(peer)
            self._leaving.remove(peer)
        arrived = []
        for peer, notes in self._agent.get_new_notifs().items():
            arrived += [(peer, part) for note in notes if (part := _decode(note)) is not None]
        return arrived

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
        for peer in list(self._peers):
            self.disconnect(peer)
        self._writes.clear()
        self._agent.deregister_memory(self._registered)
        self._caches.clear()


def _descriptors(regions: list[_Region], pages: Sequence[int]) -> np.ndarray:
    """Address, bytes and device of each page of each region: `[len(regions) * len(pages), 3]` uint64."""
    page_idx = np.asarray(pages, dtype=np.uint64)
    table = np.zeros((len(regions), len(pages), 3), dtype=np.uint64)
    for row, region in zip(table, regions, strict=True):
        row[:, 0] = page_idx * np.uint64(region.page_bytes) + np.uint64(region.address)
        row[:, 1] = region.page_bytes
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
        if cache.device.type != "cpu":
            raise Unsupported(f"nixl: pages in memory of {cache.device}")
        if not cache.is_contiguous():
            raise ValueError(f"pages of shape {list(cache.shape)} and strides {list(cache.stride())} are not one behind the other")


def _check_numbers(what: str, numbers: Sequence[int], end: int) -> None:
    wrong = [number for number in numbers if not 0 <= number < end]
    if wrong:
        raise ValueError(f"{what} {wrong[0]} is not one of the {end} that there are")
