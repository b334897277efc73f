"""Choice of experts: one program a token, all scores in registers."""

import torch
import triton
import triton.language as tl

from hw.api import GateRule, Replicas
from hw.cuda.launch import cdiv, launched, power_of_2
from hw.cuda.rules import MOST_AT_ONCE
from hw.cuda.small_gemm import row_by_row, sum_splits
from hw.cuda.triton_gate_product import gate_product_kernel

# The product of rows with the gate's weight: channels of a tile, programs that fill the GPU, most pieces of K.
_BLOCK_K, _PROGRAMS, _MOST_SPLITS = 64, 132, 56
# Most rows, and logits of all, up to which one row at a time is faster.
_FEW_ROWS, _FEW_LOGITS = 8, 1024


@triton.jit
def _first_best(values, ids, BIG: tl.constexpr):
    """(largest value, lowest id that has it) of a 1-D block."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, BIG), 0)


@launched
@triton.jit
def _gate_kernel(
    logits_ptr, bias_ptr, slots_ptr, counts_ptr, idx_ptr, phy_ptr, weight_ptr, num_experts, group_size, scaling, max_replicas,
    TOP_K: tl.constexpr, K_BLOCK: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, TOP2_SUM: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    real = ids < num_experts
    neg = float("-inf")
    # Scores in fp64, rounded once: then equal choices are equal for every implementation that is exact to a rounding.
    logits = tl.load(logits_ptr + token * num_experts + ids, real, other=neg).to(tl.float64)
    if SIGMOID:
        scores = (1.0 / (1.0 + tl.exp(-logits))).to(tl.float32)
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = (powers / tl.sum(powers, 0)).to(tl.float32)
    choice = scores
    if HAS_BIAS:
        choice = scores + tl.load(bias_ptr + ids, real, other=0.0)
    choice = tl.where(real & (choice == choice), choice, neg)  # a NaN is chosen last
    if NUM_GROUPS > 1:
        group_of = ids // group_size
        groups = tl.arange(0, GROUP_BLOCK)
        member = (groups[:, None] == group_of[None, :]) & real[None, :]
        each = tl.where(member, choice[None, :], neg)
        group_scores = tl.max(each, 1)
        if TOP2_SUM:
            first = tl.min(tl.where(each == group_scores[:, None], ids[None, :], BLOCK), 1)
            group_scores += tl.max(tl.where(ids[None, :] == first[:, None], neg, each), 1)
        group_scores = tl.where(groups < NUM_GROUPS, group_scores, neg)
        kept = ids < 0
        for _ in tl.static_range(TOPK_GROUPS):
            _best, group = _first_best(group_scores, groups, GROUP_BLOCK)
            kept = kept | (group_of == group)
            group_scores = tl.where(groups == group, neg, group_scores)
        choice = tl.where(kept, choice, neg)
    slots = tl.arange(0, K_BLOCK)
    idx = tl.zeros((K_BLOCK,), tl.int32)
    weight = tl.zeros((K_BLOCK,), tl.float32)
    free = real
    for k in tl.static_range(TOP_K):
        best = tl.max(tl.where(free, choice, neg), 0)
        expert = tl.min(tl.where(free & (choice == best), ids, BLOCK - 1), 0)
        free = free & (ids != expert)
        idx = tl.where(slots == k, expert, idx)
        weight = tl.where(slots == k, tl.sum(tl.where(ids == expert, scores, 0.0), 0), weight)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    count = tl.load(counts_ptr + idx, slots < TOP_K, other=1)
    physical = tl.load(slots_ptr + idx * max_replicas + token % count, slots < TOP_K)
    tl.store(idx_ptr + token * TOP_K + slots, idx.to(tl.int64), slots < TOP_K)
    tl.store(phy_ptr + token * TOP_K + slots, physical, slots < TOP_K)
    tl.store(weight_ptr + token * TOP_K + slots, weight * scaling, slots < TOP_K)


class GateOps:
    """See `hw.api.Ops`."""

    def gate_logits(self, x, weight):
        num_rows, (num_experts, inner) = x.shape[0], weight.shape
        assert weight.dtype == torch.float32 and weight.is_contiguous() and x.stride(1) == 1, (weight.dtype, weight.stride(), x.stride())
        if x.dtype != torch.bfloat16:
            return torch.nn.functional.linear(x.float(), weight)
        out = torch.empty((num_rows, num_experts), device=x.device)
        if not num_rows:
            return out
        if num_rows <= _FEW_ROWS and num_rows * num_experts <= _FEW_LOGITS and inner <= MOST_AT_ONCE:
            row_by_row(x, weight, out, block_n=1)
        else:
            _gate_product(x, weight, out)
        return out

    def gate_topk(self, logits, bias, rule: GateRule, replicas: Replicas):
        num_tokens, num_experts = logits.shape
        assert logits.dtype == torch.float32 and num_experts % rule.num_groups == 0, (logits.dtype, num_experts, rule.num_groups)
        logits = logits.contiguous()
        idx, phy = (torch.empty((num_tokens, rule.top_k), dtype=torch.int64, device=logits.device) for _ in range(2))
        weight = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=logits.device)
        if not num_tokens:
            return idx, phy, weight
        _gate_kernel[(num_tokens,)](
            logits, bias, replicas.slots, replicas.counts, idx, phy, weight, num_experts, num_experts // rule.num_groups, rule.scaling,
            replicas.slots.shape[1],
            TOP_K=rule.top_k, K_BLOCK=power_of_2(rule.top_k), NUM_GROUPS=rule.num_groups, TOPK_GROUPS=rule.topk_groups,
            GROUP_BLOCK=power_of_2(rule.num_groups), BLOCK=power_of_2(num_experts),
            SIGMOID=rule.scoring == "sigmoid", HAS_BIAS=bias is not None, TOP2_SUM=rule.group_score == "top2_sum",
            NORMALIZE=rule.normalize, num_warps=1,
        )  # fmt: skip
        return idx, phy, weight


def _gate_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    num_rows, (num_experts, inner) = x.shape[0], weight.shape
    block_e, block_t = 16 if num_experts <= 16 else 64, 16 if num_rows <= 16 else 64 if num_rows <= 128 else 128
    tiles_e, tiles_t, num_blocks = cdiv(num_experts, block_e), cdiv(num_rows, block_t), cdiv(inner, _BLOCK_K)
    blocks_per_split = cdiv(num_blocks, max(1, min(_PROGRAMS // (tiles_e * tiles_t), _MOST_SPLITS)))
    num_splits = cdiv(num_blocks, blocks_per_split)
    part = out if num_splits == 1 else torch.empty((num_splits, *out.shape), device=out.device)
    gate_product_kernel[(tiles_e, tiles_t, num_splits)](
        x, weight, part, num_rows, num_experts, inner, x.stride(0), blocks_per_split,
        BLOCK_E=block_e, BLOCK_T=block_t, BLOCK_K=_BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
    if num_splits > 1:
        sum_splits(part, out)
