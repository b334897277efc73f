"""One GPU as a device."""

from collections.abc import Callable

import numpy as np
import torch

from hw.api import MemoryInfo, T
from hw.cuda.kernel_cache import KernelCache
from hw.cuda.rules import FACTS
from hw.cuda.warm_up import warm_up
from hw.rules import ModelShapes


class CudaRuntime:
    """Runtime over one GPU's memory and its current stream."""

    captures = True
    runs_ahead = True

    def __init__(self, device: torch.device, kernel_cache: KernelCache):
        self.device, self._kernel_cache = device, kernel_cache
        self._pool: tuple[int, int] | None = None  # memory that all graphs share; the first one captured must be the largest

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

    def upload(self, array: np.ndarray) -> torch.Tensor:
        # From pageable memory the copy would wait for everything queued before it.
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self.device, non_blocking=True)

    def download(self, tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True) for tensor in tensors]
        done = torch.cuda.Event()
        done.record()

        def wait() -> list[torch.Tensor]:
            done.synchronize()
            return copies

        return wait

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def warm_up(self, shapes: ModelShapes, progress: bool | None = None) -> None:
        warm_up(shapes, self._kernel_cache, progress)

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        # Kernels compile, and libraries take their workspaces, at first use; neither may happen while recording.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        self._pool = graph.pool()

        def replay() -> T:
            graph.replay()
            return result

        return replay
