"""Expert dispatch on one rank: nothing leaves, tokens are only sorted by expert and put back.

throughput   x [M, D]         | expert 0 rows | expert 1 rows | ...        M = T * k, no gaps
low latency  x [E, cap, D]    expert e: | real rows | unused up to cap |   cap fixed, counts stay on the device
"""

from dataclasses import dataclass

import torch

from hw.api import Activation, Dispatched, ExpertMode, ExpertRows, ExpertStep
from hw.quant import QuantTensor, dequantize


@dataclass(frozen=True)
class LocalHandle:
    """Where each (token, k) row went: an index into the expert-sorted rows, or into the flattened masked rows."""

    home: torch.Tensor  # [T, k] int64


def combine_rows(rows: torch.Tensor, topk_weight: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    """The reduction rule: sum of weight * row in top-k order in fp32, then `shared` `[T, D]`, rounded once to the dtype of the rows.

    rows `[T, k, D]`, topk_weight `[T, k]` fp32, result `[T, D]`.
    """
    total = rows[:, 0].float() * topk_weight[:, 0, None]
    for k in range(1, rows.shape[1]):
        total = total + rows[:, k].float() * topk_weight[:, k, None]
    return (total if shared is None else total + shared.float()).to(rows.dtype)


class LocalExpertComm:
    """ExpertComm of an instance with one rank."""

    def __init__(self, max_tokens_per_rank: int):
        self.max_tokens_per_rank = max_tokens_per_rank

    def reserve(self, hidden_size: int, num_local_experts: int, dtype: torch.dtype) -> None:
        """Nothing is kept between steps."""

    def dispatch(
        self, x: Activation, topk_phy: torch.Tensor, topk_weight: torch.Tensor, step: ExpertStep, num_local_experts: int
    ) -> Dispatched:
        rows = x.smallest
        if isinstance(rows, QuantTensor):
            rows = dequantize(rows, torch.bfloat16)
        num_tokens, top_k = topk_phy.shape
        flat = topk_phy.reshape(-1)
        counts = torch.bincount(flat, minlength=num_local_experts)
        order = torch.argsort(flat, stable=True)  # by expert, then by source: independent of who else sorts
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        if step.mode is ExpertMode.THROUGHPUT:
            handle = LocalHandle(place.view(num_tokens, top_k))
            return Dispatched(step.mode, rows[order // top_k], counts.int(), ExpertRows(counts.tolist()), handle)
        assert num_tokens <= self.max_tokens_per_rank, (num_tokens, self.max_tokens_per_rank)
        starts = counts.cumsum(0) - counts
        # A token meets an expert at most once, so num_tokens rows are enough for each expert.
        home = flat * num_tokens + place - starts[flat]
        masked = rows.new_zeros(num_local_experts * num_tokens, rows.shape[1])
        masked[home] = rows.repeat_interleave(top_k, dim=0)
        handle = LocalHandle(home.view(num_tokens, top_k))
        return Dispatched(step.mode, masked.view(num_local_experts, num_tokens, rows.shape[1]), counts.int(), None, handle)

    def combine(
        self, y: torch.Tensor, topk_weight: torch.Tensor, dispatched: Dispatched, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = y.reshape(-1, y.shape[-1])[dispatched.handle.home]
        return combine_rows(rows, topk_weight, shared)
