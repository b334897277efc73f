"""Logical expert to physical expert, through the layer's placement."""

import torch

from eplb.placement import Placement
from hw.api import Replicas


def replicas_of(placement: Placement, device: torch.device) -> Replicas:
    """Device copy of a placement."""
    width = placement.max_replicas
    table = [slots + (slots[0],) * (width - len(slots)) for slots in placement.log2phy]
    counts = torch.tensor([len(slots) for slots in placement.log2phy], dtype=torch.int64, device=device)
    return Replicas(torch.tensor(table, dtype=torch.int64, device=device), counts)
