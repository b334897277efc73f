"""Expert dispatch over the ranks of an instance, on gloo.

Every (token, k) row travels to the rank of its physical expert and back; the source sums. Per pair of ranks the wire carries

    throughput    counts first, then exactly the rows that go there
    low latency   the same number of rows for every pair, known from the step's vote, unused ones marked by expert -1: no counts

Rows arrive sorted by expert, then by source rank and row, so an expert sees its rows in an order that no placement changes.
"""

from dataclasses import dataclass

import torch

from hw.api import Activation, Dispatched, ExpertMode, ExpertRows, ExpertStep, Rows
from hw.cpu.expert_comm import combine_rows
from hw.groups import Group
from hw.quant import QuantTensor, dequantize


@dataclass(frozen=True)
class EpHandle:
    """How to send expert outputs home."""

    order: torch.Tensor  # [num_sent] int64, (token, k) rows in the order they left
    arrived: torch.Tensor  # [num_real] int64, for each received row the place of its output in the layout of `Dispatched.x`
    real: torch.Tensor  # [num_received] bool, rows that are not padding
    sent: list[int]  # rows to each rank, padding included
    received: list[int]  # rows from each rank, padding included
    places: torch.Tensor  # [num_sent] int64, where among the rows that come back each sent row stands
    top_k: int


class GlooExpertComm:
    """ExpertComm of an instance with several ranks. FP8 activations (`QuantTensor`) travel as bytes, data and scales."""

    def __init__(self, group: Group, max_tokens_per_rank: int):
        self.group = group
        self.max_tokens_per_rank = max_tokens_per_rank

    def reserve(self, hidden_size: int, num_local_experts: int, dtype: torch.dtype) -> None:
        """Nothing is kept between steps."""

    def dispatch(
        self, x: Activation, topk_phy: torch.Tensor, topk_weight: torch.Tensor, step: ExpertStep, num_local_experts: int
    ) -> Dispatched:
        num_tokens, top_k = topk_phy.shape
        flat = topk_phy.reshape(-1)
        order = torch.argsort(flat, stable=True)  # by rank and expert, then by row
        experts = flat[order]
        to_rank = torch.bincount(experts // num_local_experts, minlength=self.group.size).tolist()
        if step.mode is ExpertMode.THROUGHPUT:
            from_rank = self.group.all_to_all(torch.tensor(to_rank), [1] * self.group.size, [1] * self.group.size).tolist()
            sent, received = to_rank, from_rank
            places = torch.arange(order.numel())
        else:
            assert num_tokens <= step.max_tokens <= self.max_tokens_per_rank, (num_tokens, step.max_tokens, self.max_tokens_per_rank)
            width = step.max_tokens * min(top_k, num_local_experts)  # a token meets each expert at most once
            sent = received = [width] * self.group.size
            starts = torch.tensor(to_rank).cumsum(0) - torch.tensor(to_rank)
            ranks = experts // num_local_experts
            places = ranks * width + torch.arange(order.numel()) - starts[ranks]
        local = torch.full((sum(sent),), -1, dtype=torch.int64)
        local[places] = experts % num_local_experts
        arrived_experts = self.group.all_to_all(local, sent, received)
        rows = self._exchange(x.smallest, order // top_k, places, sent, received)
        real = arrived_experts >= 0
        return self._lay_out(rows[real], arrived_experts[real], step, num_local_experts, (order, real, sent, received, places, top_k))

    def _exchange(self, x: Rows, tokens: torch.Tensor, places: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Rows of the tokens, put at `places` of the wire; what arrives is in a dtype that experts compute with."""

        def swap(part: torch.Tensor) -> torch.Tensor:
            wire = part.new_zeros(sum(sent), part.shape[1])
            wire[places] = part[tokens]
            return self.group.all_to_all(wire, sent, received)

        if not isinstance(x, QuantTensor):
            return swap(x)
        # Plain bytes: torch cannot index every float8 type.
        data, scale = (swap(part.contiguous().view(torch.uint8)).view(part.dtype) for part in (x.data, x.scale))
        return dequantize(QuantTensor(data, scale, x.format, x.block), torch.bfloat16)

    def _lay_out(self, rows: torch.Tensor, experts: torch.Tensor, step: ExpertStep, num_local_experts: int, way_home) -> Dispatched:
        order, real, sent, received, places, top_k = way_home
        counts = torch.bincount(experts, minlength=num_local_experts)
        by_expert = torch.argsort(experts, stable=True)
        place = torch.empty_like(by_expert)
        place[by_expert] = torch.arange(by_expert.numel())
        if step.mode is ExpertMode.THROUGHPUT:
            handle = EpHandle(order, place, real, sent, received, places, top_k)
            return Dispatched(step.mode, rows[by_expert], counts.int(), ExpertRows(counts.tolist()), handle)
        capacity = step.max_tokens * self.group.size
        starts = counts.cumsum(0) - counts
        arrived = experts * capacity + place - starts[experts]
        masked = rows.new_zeros(num_local_experts * capacity, rows.shape[1])
        masked[arrived] = rows
        handle = EpHandle(order, arrived, real, sent, received, places, top_k)
        return Dispatched(step.mode, masked.view(num_local_experts, capacity, rows.shape[1]), counts.int(), None, handle)

    def combine(
        self, y: torch.Tensor, topk_weight: torch.Tensor, dispatched: Dispatched, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        handle: EpHandle = dispatched.handle
        outputs = y.reshape(-1, y.shape[-1])
        wire = y.new_zeros(sum(handle.received), y.shape[-1])
        wire[handle.real] = outputs[handle.arrived]
        home = self.group.all_to_all(wire, handle.received, handle.sent)
        rows = y.new_empty(handle.order.numel(), y.shape[-1])
        rows[handle.order] = home[handle.places]
        return combine_rows(rows.view(topk_weight.shape[0], handle.top_k, y.shape[-1]), topk_weight, shared)
