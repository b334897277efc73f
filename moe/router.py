"""Logical expert to physical expert, through the layer's placement."""

import torch

from eplb.placement import Placement
from hw.api import Replicas


def replicas_of(placement: Placement, device: torch.device, *, rank: int = 0, width: int | None = None) -> Replicas:
    """A rank's copy of a placement, on its device: which slots its tokens take by turns.

    width: most replicas of an expert in any placement that may follow; None: none follows.
    """
    width = width or placement.max_replicas
    turned = placement.turns_of(rank)
    table = [slots + (slots[0],) * (width - len(slots)) for slots in turned]
    counts = torch.tensor([len(slots) for slots in turned], dtype=torch.int64, device=device)
    return Replicas(torch.tensor(table, dtype=torch.int64, device=device), counts)


def update_replicas(replicas: Replicas, placement: Placement, *, rank: int = 0) -> None:
    """Follow this placement from now on. In place, so captured steps do too."""
    fresh = replicas_of(placement, torch.device("cpu"), rank=rank, width=replicas.slots.shape[1])
    replicas.slots.copy_(fresh.slots)
    replicas.counts.copy_(fresh.counts)
