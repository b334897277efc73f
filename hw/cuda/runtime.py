"""One GPU as a device."""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from hw.api import MemoryInfo, T
from hw.cuda.kernel_cache import KernelCache
from hw.cuda.rules import FACTS
from hw.cuda.warm_up import warm_up
from hw.groups import Group, PeerLost
from hw.rules import ModelShapes

_POLL_S = 2e-5


_SENT_ALIGN = 16  # bytes, at which any dtype may begin


class CudaRuntime:
    """Runtime over one GPU's memory and its current stream."""

    captures = True
    captures_any_size = False
    runs_ahead = True
    compiles = True

    def __init__(self, device: torch.device, kernel_cache: KernelCache, peers: Group | None = None):
        """peers: ranks whose work this one's waits for; a wait longer than their timeout raises PeerLost."""
        self.device, self._kernel_cache, self._peers = device, kernel_cache, peers
        self._side, self._way = torch.cuda.Stream(device), torch.cuda.Stream(device)  # for `beside` and `fork`
        self._forked: Any = None  # the latest result of `fork`
        # Its memory is what all graphs share, so it must be the largest; and it is kept, since memory goes with the last graph that has it.
        self._first_graph: torch.cuda.CUDAGraph | None = None

    def memory(self) -> MemoryInfo:
        free, total = torch.cuda.mem_get_info(self.device)
        # What torch's allocator holds but has not given out is ours to use.
        idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return MemoryInfo(total_bytes=total, free_bytes=free + idle)

    def default_cache_bytes(self) -> int | None:
        return None

    def num_sharing(self, num_ranks: int) -> int:
        return 1  # each rank has a GPU of its own

    def compute_dtype(self, checkpoint_dtype: str) -> str:
        return FACTS.compute_dtype(checkpoint_dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        # From pageable memory the copy would wait for everything queued before it. numpy fills the pinned one: torch shares a copy of more
        # than 32,768 values among threads, which takes far longer than it saves.
        pinned = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=True)
        pinned.numpy()[...] = array
        return pinned.to(self.device, non_blocking=True)

    def send(self, *parts: tuple[np.ndarray, torch.Tensor]) -> None:
        ends = list(accumulate(-(-array.nbytes // _SENT_ALIGN) * _SENT_ALIGN for array, _ in parts))
        packed = np.empty(ends[-1], np.uint8)
        for (array, _), end in zip(parts, [0, *ends], strict=False):
            packed[end : end + array.nbytes] = array.reshape(-1).view(np.uint8)
        sent = self.upload(packed)
        for (array, target), end in zip(parts, [0, *ends], strict=False):
            target.copy_(sent[end : end + array.nbytes].view(target.dtype).view(array.shape))

    def download(self, tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        return download(tensors, self._peers)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        # Only small steps leave multiprocessors idle, and those are captured; others would only pay for a second stream's memory.
        if not torch.cuda.is_current_stream_capturing():
            result = work()
            return lambda: result
        here, there = torch.cuda.current_stream(), self._side
        there.wait_stream(here)
        with torch.cuda.stream(there):
            result = work()

        def join() -> T:
            here.wait_stream(there)
            return result

        return join

    def fork(self) -> Callable[[Callable[[], T]], T]:
        reached = torch.cuda.Event()
        reached.record()

        def behind(work: Callable[[], T]) -> T:
            here, there = torch.cuda.current_stream(), self._way
            there.wait_event(reached)
            with torch.cuda.stream(there):
                result = work()
            here.wait_stream(there)
            # The next work may be behind an earlier mark than whoever reads this result, so it must not get its memory.
            self._forked = result
            return result

        return behind

    def warm_up(self, shapes: ModelShapes, progress: bool | None = None) -> None:
        warm_up(shapes, self._kernel_cache, progress)

    def chain(self, first: Sequence[Callable[[], object]], beside: Sequence[Callable[[], object]] = ()) -> Callable[[], Callable[[], None]]:
        def nothing() -> None:
            """They are in the order of the queue."""

        def queue() -> Callable[[], None]:
            for work in works:
                work()
            return nothing

        works = (*first, *beside)
        return queue

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        # Kernels compile, and libraries take their workspaces, at first use; neither may happen while recording.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # NCCL has threads of its own that look at events meanwhile; only what this one does is recorded.
        pool = None if self._first_graph is None else self._first_graph.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
        self._first_graph = self._first_graph or graph

        def replay() -> T:
            graph.replay()
            return result

        return replay


def download(tensors: list[torch.Tensor], peers: Group | None) -> Callable[[], list[torch.Tensor]]:
    """See `hw.api.Runtime`. peers: whom the queued work may wait for; if one is later than the timeout, the wait raises PeerLost."""
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True) for tensor in tensors]
    done = torch.cuda.Event()
    done.record()

    def wait() -> list[torch.Tensor]:
        if peers is None:
            done.synchronize()
            return copies
        # A kernel waits for a peer for ever; the host does not.
        deadline = time.monotonic() + peers.timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                raise PeerLost(f"group {peers.name!r}: the device still waits for a peer after {peers.timeout_s:g} s")
            time.sleep(_POLL_S)
        return copies

    return wait
