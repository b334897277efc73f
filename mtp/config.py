"""Multi-token-prediction module of a model (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MTPConfig:
    """`num_layers` MTP modules are stored behind the main layers, as `model.layers.{first_layer_idx + i}.*`."""

    num_layers: int
    first_layer_idx: int

    def owns(self, layer_idx: int) -> bool:
        """Whether a decoder-layer number in a checkpoint belongs to an MTP module."""
        return self.first_layer_idx <= layer_idx < self.first_layer_idx + self.num_layers
