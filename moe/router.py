"""Logical expert to physical expert, through the layer's placement."""

import torch

from eplb.placement import Placement


class Router:
    """Device copy of a placement. Tokens of a replicated expert take its replicas in turn, by their row in the batch."""

    def __init__(self, placement: Placement, device: torch.device):
        width = placement.max_replicas
        table = [slots + (slots[0],) * (width - len(slots)) for slots in placement.log2phy]
        self.placement = placement
        self.log2phy = torch.tensor(table, dtype=torch.int64, device=device)  # [num_logical, width], padded with the first replica
        self.num_replicas = torch.tensor([len(slots) for slots in placement.log2phy], dtype=torch.int64, device=device)

    def forward(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """topk_idx `[T, k]` logical -> `[T, k]` physical."""
        if self.log2phy.shape[1] == 1:
            return self.log2phy[topk_idx, 0]
        rows = torch.arange(topk_idx.shape[0], device=topk_idx.device)[:, None]
        return self.log2phy[topk_idx, rows % self.num_replicas[topk_idx]]
