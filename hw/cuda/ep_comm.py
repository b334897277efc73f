"""Expert dispatch over the GPUs of an instance through NCCL all-to-alls: for what the others do not take (`hw.cuda.rules.DISPATCH`).

Every (token, k) row travels to the rank of its physical expert and back; the source sums, so results do not depend on where an expert
lives. Rows travel dense. Per pair of ranks the wire carries

    throughput    counts first, for which the host waits, then exactly the rows that go there
    low latency   the same number of rows for every pair, unused ones marked by expert -1: no counts, nothing to wait for

Rows arrive sorted by source rank and row, and so an expert sees them.
"""

from dataclasses import dataclass

import torch

from hw.api import Activation, Dispatched, ExpertMode, ExpertRows, ExpertStep
from hw.cuda.expert_comm import combine_rows
from hw.cuda.nccl import NcclGroup
from hw.cuda.runtime import download


@dataclass(frozen=True)
class RanksHandle:
    """How to send expert outputs home."""

    home: torch.Tensor  # [T, k] int64, which of the rows that come back is whose
    arrived: torch.Tensor  # [num_received] int64, for each received row its output's among all rows of the layout; padding: the last
    sent: list[int]  # rows to each rank, padding included
    received: list[int]  # rows from each rank, padding included


class NcclExpertComm:
    """ExpertComm of an instance with several ranks, of any width and dtype."""

    def __init__(self, group: NcclGroup, max_tokens_per_rank: int):
        self.group = group
        self.max_tokens_per_rank = max_tokens_per_rank

    def reserve(self, hidden_size: int, num_local_experts: int, dtype: torch.dtype) -> None:
        """Nothing is kept between steps."""

    def dispatch(
        self, x: Activation, topk_phy: torch.Tensor, topk_weight: torch.Tensor, step: ExpertStep, num_local_experts: int
    ) -> Dispatched:
        rows = x.rows(quantized=False)
        if step.mode is ExpertMode.THROUGHPUT:
            return self._exact(rows, topk_phy, num_local_experts)
        assert topk_phy.shape[0] <= step.max_tokens <= self.max_tokens_per_rank, (topk_phy.shape, step, self.max_tokens_per_rank)
        return self._fixed(rows, topk_phy, step.max_tokens, num_local_experts)

    def _exact(self, x: torch.Tensor, topk_phy: torch.Tensor, num_local: int) -> Dispatched:
        size, top_k, flat = self.group.size, topk_phy.shape[1], topk_phy.reshape(-1)
        to_experts = flat.new_zeros(size * num_local).scatter_add_(0, flat, torch.ones_like(flat))
        from_ranks = self.group.all_to_all(to_experts, [num_local] * size, [num_local] * size)
        (counts,) = download([torch.stack((to_experts, from_ranks)).view(2, size, num_local)], self.group)()
        sent, received = counts.sum(2).tolist()
        order = flat.argsort(stable=True)  # by rank and expert, then by row
        arrived = self.group.all_to_all(x.index_select(0, order // top_k), sent, received)
        local = torch.arange(num_local, device=x.device).repeat(size)
        by_expert = local.repeat_interleave(from_ranks, output_size=sum(received)).argsort(stable=True)
        handle = RanksHandle(_inverse(order).view(-1, top_k), _inverse(by_expert), sent, received)
        per_expert = from_ranks.view(size, num_local).sum(0).int()
        layout = ExpertRows(counts[1].sum(0).tolist())
        return Dispatched(ExpertMode.THROUGHPUT, arrived.index_select(0, by_expert), per_expert, layout, handle)

    def _fixed(self, x: torch.Tensor, topk_phy: torch.Tensor, most: int, num_local: int) -> Dispatched:
        size, top_k, flat = self.group.size, topk_phy.shape[1], topk_phy.reshape(-1)
        width = most * min(top_k, num_local)  # a token meets each expert at most once
        ranks = flat // num_local
        home = ranks * width + _order_within(ranks, size)
        even = [width] * size
        local = flat.new_full((size * width,), -1).index_copy_(0, home, flat % num_local)
        wire = x.new_zeros(size * width, x.shape[1]).index_copy_(0, home, x.repeat_interleave(top_k, 0))
        local, rows = self.group.all_to_all(local, even, even), self.group.all_to_all(wire, even, even)
        capacity = most * size
        nowhere = num_local * capacity
        place = torch.where(local < 0, nowhere, local * capacity + _order_within(local, num_local))
        masked = rows.new_zeros(nowhere + 1, rows.shape[1]).index_copy_(0, place, rows)[:nowhere]
        counts = (local[:, None] == torch.arange(num_local, device=x.device)).sum(0, dtype=torch.int32)
        handle = RanksHandle(home.view(-1, top_k), place.clamp(max=nowhere - 1), even, even)
        return Dispatched(ExpertMode.LOW_LATENCY, masked.view(num_local, capacity, rows.shape[1]), counts, None, handle)

    def combine(
        self, y: torch.Tensor, topk_weight: torch.Tensor, dispatched: Dispatched, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        handle: RanksHandle = dispatched.handle
        outputs = y.reshape(-1, y.shape[-1]).index_select(0, handle.arrived)
        return combine_rows(self.group.all_to_all(outputs, handle.received, handle.sent), handle.home, topk_weight, shared)


def _order_within(group_of: torch.Tensor, num_groups: int) -> torch.Tensor:
    """For each element how many before it are of its group `[n]`, 0 .. num_groups - 1; -1 counts as group 0 and is not counted."""
    member = group_of[:, None] == torch.arange(num_groups, device=group_of.device)
    return member.cumsum(0).gather(1, group_of.clamp(min=0)[:, None])[:, 0] - 1


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device=order.device))
