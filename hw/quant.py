"""Block-scaled float8 in plain torch: the format of V3's checkpoints and activations, and the oracle for fused kernels.

A value is `data * scale of its block`. Weights have square blocks, activations one row of 128 channels; the last block of
a row or column may be ragged (`kv_a_proj_with_mqa` has 576 = 4 * 128 + 64 rows, so 5 scales):

    data  [576, 7168]  e4m3        scale [5, 56]
    +------+------+----            +---+---+--
    | 128  |      |                | s | s |      rows 0..127
    | x128 |      |                +---+---+--
    +------+------+----            | ...
    | ...                          +---+---+--
    +------+------+----            | s | s |      rows 512..575
"""

from dataclasses import dataclass
from typing import Literal

import torch

E4M3_MAX = 448.0
# Smallest amax a scale is made from; a block of zeros would otherwise divide by zero. DeepGEMM's value.
AMAX_FLOOR = 1e-4

ScaleFormat = Literal["fp32", "ue8m0"]


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """A matrix, or one for each expert, as e4m3 data and one scale per block."""

    data: torch.Tensor  # [rows, cols] or [E, rows, cols] float8_e4m3fn
    scale: torch.Tensor  # [(E,) ceil(rows / block[0]), ceil(cols / block[1])] float32, or float8_e8m0fnu if ue8m0
    format: ScaleFormat = "fp32"  # ue8m0: every scale is a power of two, whatever the dtype that stores it
    block: tuple[int, int] = (128, 128)

    def __post_init__(self):
        assert self.data.ndim in (2, 3) and self.data.dtype == torch.float8_e4m3fn, f"{self.data.dtype} of shape {tuple(self.data.shape)}"
        assert self.scale.shape == scale_shape(self.data.shape, self.block), (
            f"scale {tuple(self.scale.shape)} of data {tuple(self.data.shape)} in blocks of {self.block}"
        )

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def numel(self) -> int:
        """Values, scales not counted."""
        return self.data.numel()

    def expert(self, e: int) -> "QuantTensor":
        """The matrix of one expert; a view."""
        return QuantTensor(self.data[e], self.scale[e], self.format, self.block)

    def rows(self, start: int, stop: int) -> "QuantTensor":
        """Rows `start .. stop` of a matrix; a view. They begin at a block's edge, and end at one or at the last row."""
        size, rows = self.block[0], self.data.shape[0]
        assert self.data.ndim == 2 and start % size == 0 and (stop % size == 0 or stop == rows), (start, stop, rows, self.block)
        return QuantTensor(self.data[start:stop], self.scale[start // size : -(-stop // size)], self.format, self.block)

    def copy_(self, other: "QuantTensor") -> None:
        """Take over data and scales, in place."""
        assert other.data.shape == self.data.shape and other.block == self.block, (other.data.shape, other.block)
        self.data.copy_(other.data)
        self.scale.copy_(other.scale)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """How many blocks a matrix of `shape` has; ragged ones count, a dimension of experts stays."""
    *experts, rows, cols = shape
    return *experts, -(-rows // block[0]), -(-cols // block[1])


def dequantize(q: QuantTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`data * scale` in fp32, then one rounding to `dtype`. Shaped like the data."""
    return dequantize_slice(q.data, q.scale, q.block).to(dtype)


def dequantize_slice(
    data: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], origin: tuple[int, int] = (0, 0)
) -> torch.Tensor:  # shape of data, float32
    """Dequantise a piece of a matrix that starts at `origin` within the first block of `scale`.

    A slice of a weight need not start at a block's edge: TP shards cut heads, whose rows are not always multiples of 128.
    """
    rows, cols = (
        torch.arange(first, first + size, device=data.device) // step
        for first, size, step in zip(origin, data.shape[-2:], block, strict=True)
    )
    # Widen the few scales first, then copy whole rows: one gather over both axes is several times slower.
    return data.float().mul_(scale.float()[..., cols].index_select(-2, rows))


def quantize_weight_blocks(w: torch.Tensor, block: tuple[int, int] = (128, 128), ue8m0: bool = False) -> QuantTensor:
    """Quantise a weight `[N, K]`, or `[E, N, K]` of experts, in square blocks."""
    if w.ndim == 3:
        return _stack([quantize_weight_blocks(expert, block, ue8m0) for expert in w])
    rows, cols = w.shape
    block_rows, block_cols = scale_shape(w.shape, block)
    padded = w.new_zeros(block_rows * block[0], block_cols * block[1], dtype=torch.float32)
    padded[:rows, :cols] = w
    tiles = padded.view(block_rows, block[0], block_cols, block[1])
    scale = _scales(tiles.abs().amax(dim=(1, 3)), ue8m0)
    data = _to_e4m3(tiles / scale[:, None, :, None]).view_as(padded)[:rows, :cols].contiguous()
    return QuantTensor(data, scale, "ue8m0" if ue8m0 else "fp32", block)


def quantize_activation(x: torch.Tensor, group: int = 128, ue8m0: bool = False) -> QuantTensor:
    """Quantise activations `[num_tokens, K]`, each token by itself in groups of `group` consecutive channels."""
    return quantize_weight_blocks(x, (1, group), ue8m0)


def _stack(experts: list[QuantTensor]) -> QuantTensor:
    first = experts[0]
    return QuantTensor(torch.stack([e.data for e in experts]), torch.stack([e.scale for e in experts]), first.format, first.block)


def _scales(amax: torch.Tensor, ue8m0: bool) -> torch.Tensor:
    scale = amax.clamp(min=AMAX_FLOOR) / E4M3_MAX
    if not ue8m0:
        return scale
    # 2^ceil(log2(scale)) by exponent bits: a rounded logarithm would be off by one near powers of two.
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    # e4m3fn has no infinity and x / scale can round a hair above 448, so saturate here.
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
