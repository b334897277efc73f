"""Expert-placement settings."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EPLBConfig:
    """How many replicas beyond one copy of each logical expert an instance holds, over all its ranks."""

    num_redundant_experts: int = 0

    def __post_init__(self):
        if self.num_redundant_experts < 0:
            raise ValueError(f"num_redundant_experts must be at least 0, got {self.num_redundant_experts}")
