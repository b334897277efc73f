"""The contract between layers and a checkpoint: a layer says which tensor fills which of its storages.

Layers know no files and the checkpoint reader knows no layers. A rank that holds a slice says so with `index`:

    checkpoint `q_b_proj.weight` [H * (n + r), q_lora]       this rank's storage
    +----------------------+
    | heads of rank 0      |
    +----------------------+   index (slice(a, b),)          +----------------------+
    | heads of rank 1      |  ---------------------------->  | target [b - a, ...]  |
    +----------------------+                                 +----------------------+
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

WeightKind = Literal["matrix", "norm", "gate_bias"]


@dataclass(frozen=True, eq=False)
class Weight:
    """One checkpoint tensor and the storage of ours that it, or this rank's slice of it, fills.

    Several weights may share a name (replicas of one expert, a head tied to the embedding): each is filled.
    Values are converted to the target's dtype.
    """

    name: str  # full name in the checkpoint
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    target: torch.Tensor  # a view into the layer's storage, with as many elements as the slice, in the slice's order
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

    def fill(self, value: torch.Tensor) -> None:
        """Write the slice `value` into the target, converting its dtype; in place, so graphs and views stay valid."""
        self.target.copy_(value.reshape(self.target.shape))
