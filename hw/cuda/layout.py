"""Storage of rows as DeepGEMM wants them.

masked layout: each expert's rows start at a multiple of 128 rows, since DeepGEMM stores whole tiles of rows

expert e:  | real rows | unused up to capacity | up to a multiple of 128 |     what ops see is the view [E, capacity, width]

quantised rows: e4m3 row by row, scales column by column, each column starting at 16 bytes
"""

import torch

from hw.api import Rows
from hw.quant import QuantTensor

ALIGN_ROWS = 128
GROUP = 128  # channels that share a scale


def masked_rows(num_experts: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised rows `[E, capacity, width]`, a view of aligned storage."""
    return torch.empty((num_experts, _aligned(capacity), width), dtype=dtype, device=device)[:, :capacity]


def quantized_rows(num_rows: int, width: int, device: torch.device) -> QuantTensor:
    """Uninitialised quantised rows `[num_rows, width]`."""
    data = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((width // GROUP, -(-num_rows // 4) * 4), device=device)
    return QuantTensor(data, scale.T[:num_rows], block=(1, GROUP))


def quantized_masked_rows(num_experts: int, capacity: int, width: int, device: torch.device) -> QuantTensor:
    """Uninitialised quantised rows `[E, capacity, width]`, a view of aligned storage."""
    rows = _aligned(capacity)
    data = torch.empty((num_experts, rows, width), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((num_experts, width // GROUP, rows), device=device)
    return QuantTensor(data[:, :capacity], scale.transpose(1, 2)[:, :capacity], block=(1, GROUP))


def whole(x: Rows) -> Rows:
    """The aligned storage `[E, aligned capacity, width]` behind a view of it; a copy of x if x is not one."""
    num_experts, capacity, width = x.shape
    rows = _aligned(capacity)
    if not isinstance(x, QuantTensor):
        return _behind(x, (num_experts, rows, width), (rows * width, width, 1))
    data = _behind(x.data, (num_experts, rows, width), (rows * width, width, 1))
    groups = width // GROUP
    return QuantTensor(data, _behind(x.scale, (num_experts, rows, groups), (rows * groups, 1, rows)), x.format, x.block)


def _behind(x: torch.Tensor, shape: tuple[int, int, int], strides: tuple[int, int, int]) -> torch.Tensor:
    room = x.untyped_storage().nbytes() // x.dtype.itemsize - x.storage_offset()
    if x.stride() != strides or room < shape[0] * strides[0]:
        fresh = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        fresh[:, : x.shape[1]] = x
        return fresh
    return x.as_strided(shape, strides)


def _aligned(capacity: int) -> int:
    return -(-capacity // ALIGN_ROWS) * ALIGN_ROWS
