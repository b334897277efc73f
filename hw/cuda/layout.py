"""Storage of the masked layout: each expert's rows start at a multiple of 128 rows, since DeepGEMM stores whole tiles of rows.

expert e:  | real rows | unused up to capacity | up to a multiple of 128 |     what ops see is the view [E, capacity, width]
"""

import torch

ALIGN_ROWS = 128


def masked_rows(num_experts: int, capacity: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised rows `[E, capacity, width]`, a view of aligned storage; dtype and device of `like`."""
    return torch.empty((num_experts, _aligned(capacity), width), dtype=like.dtype, device=like.device)[:, :capacity]


def whole(x: torch.Tensor) -> torch.Tensor:
    """The aligned storage `[E, aligned capacity, width]` behind a view of it; a copy of x if x is not one."""
    num_experts, capacity, width = x.shape
    shape = (num_experts, _aligned(capacity), width)
    strides = (shape[1] * width, width, 1)
    room = x.untyped_storage().nbytes() // x.dtype.itemsize - x.storage_offset()
    if x.stride() != strides or room < num_experts * strides[0]:
        fresh = masked_rows(num_experts, capacity, width, x)
        x = fresh.copy_(x)
    return x.as_strided(shape, strides)


def _aligned(capacity: int) -> int:
    return -(-capacity // ALIGN_ROWS) * ALIGN_ROWS
