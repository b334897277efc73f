"""Expert dispatch on one GPU: nothing leaves, tokens are only sorted by expert and put back.

throughput   x [M, D]         | expert 0 rows | - | expert 1 rows | - | ... | - |   gaps if quantised; M holds whatever the counts are
low latency  x [E, cap, D]    expert e: | real rows | unused up to cap |   cap = T, counts stay on the device, unused rows hold anything
"""

from dataclasses import dataclass, replace

import torch

from hw.api import Activation, Dispatched, ExpertMode, ExpertRows, ExpertStep, Rows
from hw.cuda.launch import cdiv, power_of_2
from hw.cuda.layout import ALIGN_ROWS, masked_rows, quantized_masked_rows, quantized_rows
from hw.cuda.triton_dispatch import combine_kernel, count_kernel, place_kernel, scatter_rows_kernel
from hw.quant import QuantTensor

_COLUMNS, _ROWS = 1024, 4096  # of one program
# (token, k) rows up to which each finds its own place; beyond, a pass that counts first is cheaper.
_FEW_ROWS = 4096


@dataclass(frozen=True)
class LocalHandle:
    """Where each (token, k) row went: a row of `Dispatched.x`, counted through all experts; -1: nowhere."""

    home: torch.Tensor  # [T, k] int64


class LocalExpertComm:
    """ExpertComm of an instance with one rank. In throughput mode -1 stands for an expert that is not here."""

    def __init__(self, max_tokens_per_rank: int):
        self.max_tokens_per_rank = max_tokens_per_rank

    def reserve(self, hidden_size: int, num_local_experts: int, dtype: torch.dtype) -> None:
        """Nothing is kept between steps."""

    def dispatch(
        self,
        x: Activation,
        topk_phy: torch.Tensor,
        topk_weight: torch.Tensor,
        step: ExpertStep,
        num_local_experts: int,
        counts_host: list[int] | None = None,
    ) -> Dispatched:
        """counts_host: rows of each expert, where the host happens to know them; then M is no larger than they need."""
        rows, topk_phy = x.smallest, topk_phy.contiguous()
        num_tokens, width = rows.shape
        device, quant = topk_phy.device, isinstance(rows, QuantTensor)
        home = torch.full_like(topk_phy, -1) if step.mode is ExpertMode.THROUGHPUT else torch.empty_like(topk_phy)
        counts = torch.empty((num_local_experts,), dtype=torch.int32, device=device)
        if step.mode is ExpertMode.THROUGHPUT:
            align = ALIGN_ROWS if quant else 1
            ends = None if counts_host is not None else torch.empty_like(counts)
            _place(topk_phy, home, counts, ends, align=align)
            # Waiting for the counts would cost more than rows that nobody needs.
            layout = ExpertRows(counts_host, align, ends=ends)
            num_rows = most_rows(topk_phy, num_local_experts, align) if counts_host is None else layout.starts[-1]
            if quant:
                layout = replace(layout, experts=torch.full((num_rows,), -1, dtype=torch.int32, device=device))
            sorted_rows = quantized_rows(num_rows, width, device) if quant else rows.new_empty(num_rows, width)
            _scatter(rows, topk_phy, home, sorted_rows, experts=layout.experts)
            return Dispatched(step.mode, sorted_rows, counts, layout, LocalHandle(home))
        assert num_tokens <= self.max_tokens_per_rank, (num_tokens, self.max_tokens_per_rank)
        # A token meets an expert at most once, so num_tokens rows are enough for each expert.
        few = topk_phy.numel() <= _FEW_ROWS
        if not few:
            _place(topk_phy, home, counts, None, capacity=num_tokens)
        shape = num_local_experts, num_tokens, width
        masked = quantized_masked_rows(*shape, device) if quant else masked_rows(*shape, rows.dtype, device)
        _scatter(rows, topk_phy, home, masked, counts=counts if few else None)
        return Dispatched(step.mode, masked, counts, None, LocalHandle(home), expected_rows(topk_phy, num_local_experts))

    def combine(
        self, y: torch.Tensor, topk_weight: torch.Tensor, dispatched: Dispatched, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        return combine_rows(y, dispatched.handle.home, topk_weight, shared)


def most_rows(topk_phy: torch.Tensor, num_local_experts: int, align: int) -> int:
    """Rows that hold any choice of experts, each expert's rows at a multiple of `align`."""
    num_rows = topk_phy.numel()
    return (num_rows + min(num_rows, num_local_experts) * (align - 1)) // align * align


def expected_rows(topk_phy: torch.Tensor, num_local_experts: int, if_none: int = 1) -> int:
    """Rows of an expert if tokens are spread evenly and other ranks have as many; `if_none`: tokens to go by if there are none."""
    num_tokens, top_k = topk_phy.shape
    return -(-(num_tokens or if_none) * top_k // num_local_experts)


def combine_rows(y: torch.Tensor, home: torch.Tensor, topk_weight: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    """The reduction rule: sum of weight * row in top-k order in fp32, then `shared` `[T, D]`, rounded once: `[T, D]` in y's dtype.

    y `[M, D]` or `[E, cap, D]`; home `[T, k]` int64, rows of y counted through all experts, -1: none; topk_weight `[T, k]` fp32.
    """
    num_tokens, top_k = home.shape
    topk_weight, width = topk_weight.contiguous(), y.shape[-1]
    assert y.stride(-1) == 1 and y.stride(-2) == width, y.stride()
    assert shared is None or shared.is_contiguous(), shared.stride()
    out = torch.empty((num_tokens, width), dtype=y.dtype, device=y.device)
    if num_tokens:
        block = min(_COLUMNS, power_of_2(width))
        combine_kernel[(num_tokens, cdiv(width, block))](
            y, home, topk_weight, shared, out, y.shape[-2], y.stride(0), width, TOP_K=top_k, HAS_SHARED=shared is not None,
                BLOCK=block,
        )  # fmt: skip
    return out


def _place(topk_phy: torch.Tensor, home: torch.Tensor, counts: torch.Tensor, ends: torch.Tensor | None, *, capacity=0, align=1) -> None:
    """Home of each (token, k) row and rows of each expert. Experts lie `capacity` rows apart, or if 0 follow each other, aligned; then also
    where each ends, as `ExpertRows.ends`.
    """
    num_experts, num_rows = counts.shape[0], topk_phy.numel()
    num_blocks = max(1, cdiv(num_rows, _ROWS))
    block_counts = torch.empty((num_experts, num_blocks), dtype=torch.int32, device=counts.device)
    grid = (num_experts, num_blocks)
    count_kernel[grid](topk_phy, block_counts, num_rows, BLOCK=_ROWS)
    place_kernel[grid](
        topk_phy, block_counts, home, counts, ends, num_rows, capacity, align,
        BLOCK=_ROWS, EXPERTS=power_of_2(num_experts), BLOCKS=power_of_2(num_blocks),
    )  # fmt: skip


def _scatter(
    x: Rows,
    topk_phy: torch.Tensor,
    home: torch.Tensor,
    out: Rows,
    *,
    counts: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> None:
    """Copy rows to their homes in `out`, sorted or masked. counts: find the homes too, and count; experts: note each row's expert."""
    num_rows, place = topk_phy.numel(), counts is not None
    num_programs = num_rows + counts.shape[0] if place else x.shape[0]
    if not num_programs:
        return
    quant = isinstance(x, QuantTensor)
    data, out_data, width = x.data if quant else x, out.data if quant else out, x.shape[1]
    assert data.stride(1) == 1, data.stride()
    strides = (out_data.stride(0), *((out.scale.stride(0), out.scale.stride(-1)) if quant else (0, 0)))
    scatter_rows_kernel[(num_programs,)](
        data, x.scale if quant else None, topk_phy, home, out_data, out.scale if quant else None, experts, counts,
        data.stride(0), *(x.scale.stride() if quant else (0, 0)), num_rows, out_data.shape[-2], *strides, width,
        TOP_K=topk_phy.shape[1], PLACE=place, QUANT=quant, HAS_EXPERTS=experts is not None,
        BLOCK=min(8192, max(128, power_of_2(width))), num_warps=4,
    )  # fmt: skip
