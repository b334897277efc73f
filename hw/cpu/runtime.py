"""The CPU as a device: memory as the kernel and the container report it."""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch

from hw.api import MemoryInfo, T
from hw.cpu.recording import Recorder
from hw.cpu.rules import FACTS
from hw.rules import ModelShapes

# Pages beyond this must be asked for: a CPU machine usually has other tenants.
DEFAULT_CACHE_BYTES = 4 << 30
_SLAB_BYTES = 32 << 20  # of which small weights take what they need
_LINE = 64  # bytes of a cache line


class CpuRuntime:
    """Runtime over host memory."""

    captures_any_size = True
    runs_ahead = False
    compiles = False
    _slab = np.empty(0, np.uint8)  # what is left of the latest one that `empty` began

    def __init__(self, recorder: Recorder | None = None):
        """recorder: for captured work; None: it is done again each time."""
        self.device, self._recorder = torch.device("cpu"), recorder
        self.captures = recorder is not None

    def memory(self) -> MemoryInfo:
        fields = {}
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, value = line.split(":")
            fields[name] = int(value.split()[0]) * 1024
        total, free = fields["MemTotal"], fields["MemAvailable"]
        limit, used = _cgroup_bytes()
        if limit is not None and limit < total:
            total, free = limit, min(free, limit - used)
        return MemoryInfo(total_bytes=total, free_bytes=max(free, 0))

    def default_cache_bytes(self) -> int | None:
        return DEFAULT_CACHE_BYTES

    def num_sharing(self, num_ranks: int) -> int:
        return num_ranks

    def compute_dtype(self, checkpoint_dtype: str) -> str:
        return FACTS.compute_dtype(checkpoint_dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # numpy asks the kernel for zero pages, which cost nothing until touched; torch writes them all.
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        if not num_bytes:  # numpy gives an empty array a stride that view refuses
            return torch.zeros(shape, dtype=dtype)
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # numpy asks for large pages, from 4 MiB on; through small ones weights come from memory at two thirds of the speed. So what is
        # smaller shares a slab.
        num_bytes, slab = prod(shape) * dtype.itemsize, self._slab
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        if num_bytes > slab.nbytes:
            slab = np.empty(max(num_bytes, _SLAB_BYTES) + _LINE, np.uint8)
            slab = slab[-slab.ctypes.data % _LINE :]
        if num_bytes < _SLAB_BYTES:
            self._slab = slab[-(-num_bytes // _LINE) * _LINE :]
        return torch.from_numpy(slab[:num_bytes]).view(dtype).view(shape)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def send(self, *parts: tuple[np.ndarray, torch.Tensor]) -> None:
        for array, target in parts:
            target.numpy()[...] = array

    def download(self, tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        return lambda: tensors

    def synchronize(self) -> None:
        """CPU ops are done when they return."""

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        result = work()
        return lambda: result

    def fork(self) -> Callable[[Callable[[], T]], T]:
        return lambda work: work()

    def warm_up(self, shapes: ModelShapes, progress: bool | None = None) -> None:
        """Nothing is compiled."""

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        return work if self._recorder is None else self._recorder.capture(work)

    def chain(self, first: Sequence[Callable[[], object]], beside: Sequence[Callable[[], object]] = ()) -> Callable[[], Callable[[], None]]:
        if self._recorder is not None:
            return self._recorder.chain(first, beside)

        def run() -> Callable[[], None]:
            for work in (*first, *beside):
                work()
            return self.synchronize

        return run


def _cgroup_bytes() -> tuple[int | None, int]:
    """(limit, used) of the control group, (None, 0) without one."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None, 0
    return (None if limit == "max" else int(limit)), used
