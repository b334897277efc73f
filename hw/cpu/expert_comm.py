"""Expert dispatch on one rank: nothing leaves, tokens are only sorted by expert and put back.

throughput   x [M, D]         | expert 0 rows | expert 1 rows | ...        M = T * k, no gaps
low latency  x [E, cap, D]    expert e: | real rows | unused up to cap |   cap fixed, counts stay on the device
"""

from dataclasses import dataclass

import torch

from hw.api import Dispatched, ExpertMode, ExpertStep


@dataclass(frozen=True)
class LocalHandle:
    """Where each (token, k) row went: an index into the expert-sorted rows, or into the flattened masked rows."""

    home: torch.Tensor  # [T, k] int64


def combine_rows(rows: torch.Tensor, topk_weight: torch.Tensor) -> torch.Tensor:
    """The reduction rule: sum of weight * row in top-k order in fp32. rows `[T, k, D]`, topk_weight `[T, k]` fp32, result `[T, D]` fp32."""
    total = rows[:, 0].float() * topk_weight[:, 0, None]
    for k in range(1, rows.shape[1]):
        total = total + rows[:, k].float() * topk_weight[:, k, None]
    return total


class LocalExpertComm:
    """ExpertComm of an instance with one rank."""

    def __init__(self, max_tokens_per_rank: int):
        self.max_tokens_per_rank = max_tokens_per_rank

    def dispatch(self, x: torch.Tensor, topk_phy: torch.Tensor, step: ExpertStep, num_local_experts: int) -> Dispatched:
        num_tokens, top_k = topk_phy.shape
        flat = topk_phy.reshape(-1)
        counts = torch.bincount(flat, minlength=num_local_experts)
        order = torch.argsort(flat, stable=True)  # by expert, then by source: independent of who else sorts
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        if step.mode is ExpertMode.THROUGHPUT:
            handle = LocalHandle(place.view(num_tokens, top_k))
            return Dispatched(step.mode, x[order // top_k], counts, counts.tolist(), handle)
        assert num_tokens <= self.max_tokens_per_rank, (num_tokens, self.max_tokens_per_rank)
        starts = counts.cumsum(0) - counts
        # A token meets an expert at most once, so num_tokens rows are enough for each expert.
        home = flat * num_tokens + place - starts[flat]
        masked = x.new_zeros(num_local_experts * num_tokens, x.shape[1])
        masked[home] = x.repeat_interleave(top_k, dim=0)
        handle = LocalHandle(home.view(num_tokens, top_k))
        return Dispatched(step.mode, masked.view(num_local_experts, num_tokens, x.shape[1]), counts, None, handle)

    def combine(self, y: torch.Tensor, topk_weight: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        rows = y.reshape(-1, y.shape[-1])[dispatched.handle.home]
        return combine_rows(rows, topk_weight)
