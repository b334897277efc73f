"""Expert dispatch on one GPU: nothing leaves, tokens are only sorted by expert and put back.

throughput   x [M, D]         | expert 0 rows | expert 1 rows | ...        M = T * k, no gaps; the host waits for the counts
low latency  x [E, cap, D]    expert e: | real rows | unused up to cap |   cap = T, counts stay on the device, unused rows hold anything
"""

from dataclasses import dataclass

import torch
import triton

from hw.api import Activation, Dispatched, ExpertMode, ExpertRows, ExpertStep
from hw.cuda.layout import masked_rows
from hw.cuda.triton_dispatch import combine_kernel, place_kernel, scatter_rows_kernel

_COLUMNS, _ROWS = 2048, 1024  # of one program


@dataclass(frozen=True)
class LocalHandle:
    """Where each (token, k) row went: a row of `Dispatched.x`, counted through all experts."""

    home: torch.Tensor  # [T, k] int64


class LocalExpertComm:
    """ExpertComm of an instance with one rank."""

    def __init__(self, max_tokens_per_rank: int):
        self.max_tokens_per_rank = max_tokens_per_rank

    def dispatch(self, x: Activation, topk_phy: torch.Tensor, step: ExpertStep, num_local_experts: int) -> Dispatched:
        num_tokens, top_k = topk_phy.shape
        x, topk_phy = x.rows(quantized=False), topk_phy.contiguous()
        rank = torch.empty_like(topk_phy)
        counts = torch.empty((num_local_experts,), dtype=torch.int32, device=x.device)
        place_kernel[(num_local_experts,)](topk_phy, rank, counts, num_tokens * top_k, BLOCK=_ROWS)
        if step.mode is ExpertMode.THROUGHPUT:
            home = (counts.cumsum(0) - counts)[topk_phy] + rank
            rows = torch.empty((num_tokens * top_k, x.shape[1]), dtype=x.dtype, device=x.device)
            _scatter(x, home, rows)
            return Dispatched(step.mode, rows, counts, ExpertRows(counts.tolist()), LocalHandle(home))
        assert num_tokens <= self.max_tokens_per_rank, (num_tokens, self.max_tokens_per_rank)
        # A token meets an expert at most once, so num_tokens rows are enough for each expert.
        home = topk_phy * num_tokens + rank
        masked = masked_rows(num_local_experts, num_tokens, x.shape[1], x.dtype, x.device)
        _scatter(x, home, masked)
        return Dispatched(step.mode, masked, counts, None, LocalHandle(home))

    def combine(
        self, y: torch.Tensor, topk_weight: torch.Tensor, dispatched: Dispatched, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        home = dispatched.handle.home
        num_tokens, top_k = home.shape
        topk_weight, width = topk_weight.contiguous(), y.shape[-1]
        assert y.stride(-1) == 1 and y.stride(-2) == width, y.stride()
        out = torch.empty((num_tokens, width), dtype=y.dtype, device=y.device)
        if num_tokens:
            block = min(_COLUMNS, triton.next_power_of_2(width))
            combine_kernel[(num_tokens, triton.cdiv(width, block))](
                y, home, topk_weight, shared, out, y.shape[-2], y.stride(0), width, TOP_K=top_k,
                HAS_SHARED=shared is not None, BLOCK=block,
            )  # fmt: skip
        return out


def _scatter(x: torch.Tensor, home: torch.Tensor, out: torch.Tensor) -> None:
    if not x.shape[0]:
        return
    assert x.stride(1) == 1, x.stride()
    width = x.shape[1]
    block = min(_COLUMNS, triton.next_power_of_2(width))
    grid = (x.shape[0], triton.cdiv(width, block))
    scatter_rows_kernel[grid](x, home, out, x.stride(0), out.shape[-2], out.stride(0), width, TOP_K=home.shape[1], BLOCK=block)
