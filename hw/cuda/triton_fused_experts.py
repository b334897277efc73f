"""Routed experts of few tokens, all on this GPU, in two kernels: no row is sorted by expert, none is put back.

    gate_up_kernel   of each (token, expert) pair: both products and what joins them, silu(gate) * up
    down_kernel      of each token: the products of all its experts, their weighted sum, and the shared experts' row

Each pair reads its expert's weights, so tokens that share experts read them again.
"""

import triton
import triton.language as tl

from hw.cuda.launch import launched
from hw.cuda.triton_elementwise import swiglu


@launched
@triton.jit
def gate_up_kernel(
    x_ptr, expert_ptr, weight_ptr, out_ptr, inner, hidden, x_stride,
    TOP_K: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of inner channels, tokens * top-k). Weight `[E, 2 * inner, hidden]` contiguous, gate rows first; out `[T * k, inner]`.

    SPLIT warps take BLOCK_K channels each at a time, which together divide hidden; BLOCK_N divides inner.
    """
    pair = tl.program_id(1).to(tl.int64)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    split = tl.arange(0, SPLIT)[:, None, None] * BLOCK_K
    expert = tl.load(expert_ptr + pair)
    gate_tile = weight_ptr + expert * 2 * inner * hidden + split + n[None, :, None] * hidden + k[None, None, :]
    x_tile = x_ptr + pair // TOP_K * x_stride + split + k[None, :, None]
    gate = tl.zeros((SPLIT, BLOCK_N, 1), tl.float32)
    up = tl.zeros((SPLIT, BLOCK_N, 1), tl.float32)
    for start in range(0, hidden, SPLIT * BLOCK_K):
        x = tl.load(x_tile + start)
        gate = tl.dot(tl.load(gate_tile + start), x, gate)
        up = tl.dot(tl.load(gate_tile + inner * hidden + start), x, up)
    dtype = out_ptr.dtype.element_ty
    out = swiglu(tl.sum(gate, 0).to(dtype), tl.sum(up, 0).to(dtype))
    tl.store(out_ptr + pair * inner + n, tl.reshape(out, (BLOCK_N,)))


@launched
@triton.jit
def down_kernel(
    inner_ptr, expert_ptr, topk_weight_ptr, weight_ptr, shared_ptr, out_ptr, hidden, inner,
    HAS_SHARED: tl.constexpr, TOP_K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of hidden channels, tokens); a warp for each of a token's experts. Rows `[T * k, inner]`, weight `[E, hidden, inner]`.

    Sums as `combine_kernel` does. BLOCK_K divides inner, BLOCK_N hidden.
    """
    token = tl.program_id(1).to(tl.int64)
    slot, k, n = tl.arange(0, K_BLOCK), tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = (slot < TOP_K)[:, None, None]
    expert = tl.load(expert_ptr + token * TOP_K + slot, slot < TOP_K, other=0)
    w_tile = weight_ptr + (expert * hidden * inner)[:, None, None] + n[None, :, None] * inner + k[None, None, :]
    x_tile = inner_ptr + (token * TOP_K + slot)[:, None, None] * inner + k[None, :, None]
    acc = tl.zeros((K_BLOCK, BLOCK_N, 1), tl.float32)
    for start in range(0, inner, BLOCK_K):
        acc = tl.dot(tl.load(w_tile + start, real, other=0.0), tl.load(x_tile + start, real, other=0.0), acc)
    dtype = out_ptr.dtype.element_ty
    rows = tl.reshape(acc, (K_BLOCK, BLOCK_N)).to(dtype).to(tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.sum(tl.where(slot[:, None] == j, rows, 0.0), 0) * tl.load(topk_weight_ptr + token * TOP_K + j)
    if HAS_SHARED:
        total += tl.load(shared_ptr + token * hidden + n).to(tl.float32)
    tl.store(out_ptr + token * hidden + n, total.to(dtype))
