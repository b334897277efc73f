"""How weights of experts travel between the ranks of an instance."""

from dataclasses import dataclass
from typing import Protocol

import torch


class Exchange(Protocol):
    """A group of ranks that trade rows."""

    rank: int
    size: int

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Send `send[i]` rows of x `[sum(send), ...]` to rank i; the result holds `receive[i]` rows of each rank, in rank order."""


@dataclass(frozen=True)
class ExpertMoves:
    """How weights of experts travel between ranks, and roughly what that costs and gains; for decisions, not for measurements."""

    group: Exchange  # all ranks
    node_bytes_per_s: float  # into a rank, from ranks of its node
    network_bytes_per_s: float  # into a rank, from other nodes
    expert_flops_per_s: float  # of a rank's expert products
