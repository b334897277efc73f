"""Where a rank sits: pure integers, no torch.

An instance has `dp * tp` ranks. Ranks of one TP group are neighbours, TP groups are numbered by their DP rank, and
every rank takes part in expert parallelism, so the EP rank equals the rank.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """Coordinates of one rank inside its instance."""

    rank: int
    node: int
    dp: int
    tp: int
    ep: int


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of one instance: data-parallel replicas, tensor-parallel ranks of each, nodes they are spread over."""

    dp: int = 1
    tp: int = 1
    nodes: int = 1

    def __post_init__(self):
        for name in ("dp", "tp", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_ranks % self.nodes:
            raise ValueError(f"{self.num_ranks} ranks (dp {self.dp} x tp {self.tp}) do not divide over {self.nodes} nodes")

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp

    @property
    def ep(self) -> int:
        """Size of the expert-parallel group: all ranks."""
        return self.num_ranks

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.nodes

    def place(self, rank: int) -> RankPlace:
        assert 0 <= rank < self.num_ranks, rank
        return RankPlace(rank=rank, node=rank // self.ranks_per_node, dp=rank // self.tp, tp=rank % self.tp, ep=rank)

    def tp_group(self, dp: int) -> list[int]:
        """Ranks that hold the heads of DP replica `dp`."""
        return list(range(dp * self.tp, (dp + 1) * self.tp))
