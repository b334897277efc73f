"""The contract between layers and a checkpoint: a layer says which tensor fills which of its storages.

Layers know no files and the checkpoint reader knows no layers. A rank that holds a slice says so with `index`:

    checkpoint `q_b_proj.weight` [H * (n + r), q_lora]       this rank's storage
    +----------------------+
    | heads of rank 0      |
    +----------------------+   index (slice(a, b),)          +----------------------+
    | heads of rank 1      |  ---------------------------->  | target [b - a, ...]  |
    +----------------------+                                 +----------------------+
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from hw.quant import QuantTensor, ScaleFormat, quantize_weight_blocks, scale_shape

Matrix = torch.Tensor | QuantTensor
WeightKind = Literal["matrix", "norm", "gate_bias"]


@dataclass(frozen=True)
class Storage:
    """How a rank allocates its parameters: activations' dtype, device, and block-FP8 for matrices that are stored so."""

    dtype: torch.dtype
    device: torch.device
    fp8_block: tuple[int, int] | None = None  # None: every matrix is in `dtype`
    scale_format: ScaleFormat = "fp32"
    empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None  # where it comes from; None: torch's own

    def dense(self, *shape: int) -> torch.Tensor:
        """Uninitialised, in the activations' dtype."""
        return self._empty(shape, self.dtype)

    def matrix(self, *shape: int, edges: tuple[int, ...] = ()) -> Matrix:
        """A weight `[N, K]`, or `[E, N, K]` of experts, that a checkpoint may hold in block-FP8.

        edges: where pieces of it meet, or where this rank's slice ends. If one of them cuts a block, the matrix is kept in `dtype`.
        """
        if self.fp8_block is None or any(edge % block for edge in edges for block in self.fp8_block):
            return self.dense(*shape)
        data = self._empty(shape, torch.float8_e4m3fn)
        scale = self._empty(scale_shape(shape, self.fp8_block), torch.float32)
        return QuantTensor(data, scale, self.scale_format, self.fp8_block)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device) if self.empty is None else self.empty(shape, dtype)


def rows(matrix: Matrix, start: int, stop: int) -> Matrix:
    """A view of rows `start .. stop` of `[N, K]`."""
    return matrix.rows(start, stop) if isinstance(matrix, QuantTensor) else matrix[start:stop]


def expert(matrix: Matrix, e: int) -> Matrix:
    """A view of expert e of `[E, N, K]`."""
    return matrix.expert(e) if isinstance(matrix, QuantTensor) else matrix[e]


@dataclass(frozen=True, eq=False)
class Weight:
    """One checkpoint tensor and the storage of ours that it, or this rank's slice of it, fills.

    Several weights may share a name (replicas of one expert, a head tied to the embedding): each is filled.
    Values are converted to the target's dtype.
    """

    name: str  # full name in the checkpoint
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    target: Matrix  # a view into the layer's storage, with as many elements as the slice, in the slice's order
    index: tuple[slice, ...] = ()  # which part this rank holds, step 1, from the first dimension on; (): all
    kind: WeightKind = "matrix"  # how a dummy value is drawn

    def __post_init__(self):
        assert len(self.index) <= len(self.shape), f"{self.name}: index {self.index} of a tensor of shape {self.shape}"
        assert all(part.step in (None, 1) for part in self.index), f"{self.name}: index {self.index} has a step"
        assert self.target.numel() == prod(self.slice_shape), (
            f"{self.name}: slice {self.slice_shape} does not fill a target of {tuple(self.target.shape)}"
        )

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of the part this rank holds."""
        parts = self.index + (slice(None),) * (len(self.shape) - len(self.index))
        return tuple(len(range(*part.indices(size))) for part, size in zip(parts, self.shape, strict=True))

    def fill(self, value: Matrix) -> None:
        """Write the slice `value` into the target, converting its dtype; in place, so graphs and views stay valid.

        A target in block-FP8 takes a QuantTensor as it is and quantises anything else.
        """
        if not isinstance(self.target, QuantTensor):
            self.target.copy_(value.reshape(self.target.shape))
            return
        if not isinstance(value, QuantTensor):
            value = quantize_weight_blocks(value, self.target.block, self.target.format == "ue8m0")
        self.target.copy_(value)
