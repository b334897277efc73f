"""One GPU as a device."""

import torch

from hw.api import MemoryInfo


class CudaRuntime:
    """Runtime over one GPU's memory."""

    runs_ahead = True

    def __init__(self, device: torch.device):
        self.device = device

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
        return "float32" if checkpoint_dtype == "float32" else "bfloat16"

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
