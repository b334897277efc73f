"""Ragged multi-head attention with log-sum-exp, and the join of two partial results.

A head dim that is no power of two is taken in two parts, 192 = 128 + 64, so that the matrix units see no padding.
"""

import triton
import triton.language as tl

from hw.cuda.launch import launched

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _tile_of(source, first, row_stride, head_col, real, cols, width, TMA: tl.constexpr, MASKED: tl.constexpr):
    """Rows `first ..` of one head, `[BLOCK_N, columns]`. TMA: source is a descriptor and zeros are beyond its end; else a pointer."""
    if TMA:
        tile = source.load([first.to(tl.int32), head_col])
    else:
        rows = source + (first + tl.arange(0, real.shape[0])) * row_stride + head_col
        mask = (cols < width)[None, :]
        if MASKED:
            mask = mask & real[:, None]
        tile = tl.load(rows[:, None] + cols[None, :], mask, other=0.0)
    return tile


@triton.jit
def _attend(
    q_a, q_b, k_a_source, k_b_source, v_source, k_first, start, k_len, visible, top, total, acc, k_stride, k_col, v_stride, v_col,
    key_dim, value_dim, scale,
    TMA: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One tile of keys. `scale` includes log2(e)."""
    position = start + tl.arange(0, BLOCK_N)
    real = position < k_len
    first = k_first + start
    k_a = _tile_of(k_a_source, first, k_stride, k_col, real, tl.arange(0, BLOCK_A), key_dim, TMA, MASKED)
    scores = tl.dot(q_a, tl.trans(k_a), input_precision="ieee")
    if BLOCK_B:
        k_b = _tile_of(k_b_source, first, k_stride, k_col + BLOCK_A, real, tl.arange(0, BLOCK_B), key_dim - BLOCK_A, TMA, MASKED)
        scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision="ieee")
    scores = scores * scale
    if MASKED:
        scores = tl.where(real[None, :] & (position[None, :] < visible[:, None]), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    finite = new_top
    if MASKED:
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    probs = tl.exp2(scores - finite[:, None])
    decay = tl.exp2(top - finite)
    total = total * decay + tl.sum(probs, 1)
    value = _tile_of(v_source, first, v_stride, v_col, real, tl.arange(0, BLOCK_V), value_dim, TMA, MASKED)
    acc = tl.dot(probs.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def prefill_kernel(
    q_ptr, k_a_source, k_b_source, v_source, q_starts_ptr, k_starts_ptr, out_ptr, lse_ptr, q_stride, q_head_stride, k_stride, k_head_stride,
    v_stride, v_head_stride, num_heads, key_dim, value_dim, scale,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of queries, heads, sequences). BLOCK_A + BLOCK_B cover the key dim, BLOCK_B may be 0. out `[T, H, v]`, lse `[T, H]`.

    Key tiles that every query of the block sees whole come first, without masks; then those at the diagonal and at the end.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # causal: the longest first
    head, seq = tl.program_id(1), tl.program_id(2)
    q_first, k_first = tl.load(q_starts_ptr + seq).to(tl.int64), tl.load(k_starts_ptr + seq).to(tl.int64)
    q_len, k_len = (tl.load(q_starts_ptr + seq + 1) - q_first).to(tl.int32), (tl.load(k_starts_ptr + seq + 1) - k_first).to(tl.int32)
    if block * BLOCK_M >= q_len:
        return
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < q_len
    a_cols, b_cols, v_cols = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B if BLOCK_B else 16), tl.arange(0, BLOCK_V)
    v_ok = v_cols < value_dim
    q_row = q_ptr + (q_first + rows) * q_stride + head * q_head_stride
    q_a = tl.load(q_row[:, None] + a_cols[None, :], row_ok[:, None] & (a_cols < key_dim)[None, :], other=0.0)
    q_b = q_a
    if BLOCK_B:
        q_b = tl.load(q_row[:, None] + BLOCK_A + b_cols[None, :], row_ok[:, None] & (BLOCK_A + b_cols < key_dim)[None, :], other=0.0)
    visible = tl.zeros((BLOCK_M,), tl.int32) + k_len
    whole, high = k_len, k_len  # keys that all queries see, keys that any sees
    if CAUSAL:
        visible = k_len - q_len + 1 + rows
        whole = tl.minimum(k_len, tl.maximum(0, k_len - q_len + 1 + block * BLOCK_M))
        high = tl.minimum(k_len, k_len - q_len + (block + 1) * BLOCK_M)
    whole = whole // BLOCK_N * BLOCK_N

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # of scores in units of log 2
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for start in range(0, whole, BLOCK_N):
        top, total, acc = _attend(
            q_a, q_b, k_a_source, k_b_source, v_source, k_first, start, k_len, visible, top, total, acc, k_stride, head * k_head_stride,
            v_stride, head * v_head_stride, key_dim, value_dim, scale * LOG2_E, TMA, False, BLOCK_N, BLOCK_A, BLOCK_B, BLOCK_V,
        )  # fmt: skip
    for start in range(whole, high, BLOCK_N):
        top, total, acc = _attend(
            q_a, q_b, k_a_source, k_b_source, v_source, k_first, start, k_len, visible, top, total, acc, k_stride, head * k_head_stride,
            v_stride, head * v_head_stride, key_dim, value_dim, scale * LOG2_E, TMA, True, BLOCK_N, BLOCK_A, BLOCK_B, BLOCK_V,
        )  # fmt: skip

    place = (q_first + rows) * num_heads + head
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + place[:, None] * value_dim + v_cols[None, :], out.to(out_ptr.dtype.element_ty), row_ok[:, None] & v_ok[None, :])
    tl.store(lse_ptr + place, tl.where(total == 0.0, float("-inf"), (top + tl.log2(total)) * LN_2), row_ok)


@launched
@triton.jit
def merge_kernel(out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, width, BLOCK: tl.constexpr):
    """Grid (rows,); everything contiguous, out `[rows, width]`, lse `[rows]`."""
    row = tl.program_id(0).to(tl.int64)
    lse_a, lse_b = tl.load(lse_a_ptr + row), tl.load(lse_b_ptr + row)
    top = tl.maximum(lse_a, lse_b)
    finite = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(lse_a - finite), tl.exp(lse_b - finite)
    total = weight_a + weight_b
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    a = tl.load(out_a_ptr + row * width + cols, mask, other=0.0).to(tl.float32)
    b = tl.load(out_b_ptr + row * width + cols, mask, other=0.0).to(tl.float32)
    out = (a * weight_a + b * weight_b) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * width + cols, out.to(out_ptr.dtype.element_ty), mask)
    tl.store(lse_ptr + row, tl.where(total == 0.0, float("-inf"), finite + tl.log(total)))
