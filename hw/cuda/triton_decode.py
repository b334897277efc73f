"""Paged absorbed attention for any latent size: the key is read once and its first L values are the value.

One program attends a block of (query, head) rows of one sequence over one piece ("split") of its pages; a second kernel joins the splits.

    rows of a sequence, j * num_heads + h      its tokens, in splits of whole key tiles
    | block of BLOCK_M rows |     x            | split 0 | split 1 | ... |
"""

import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    q_ptr, cache_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, q_batch_stride, q_token_stride, q_head_stride, table_stride,
    num_heads, num_rows, query_len, page_size, latent, rope, scale, num_splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, blocks of rows, splits). out `[splits, B, rows, L]`, lse `[splits, B, rows]`; cache contiguous."""
    seq = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < num_rows
    token, head = rows // num_heads, rows % num_heads
    seq_len = tl.load(lens_ptr + seq)
    visible = seq_len - query_len + 1 + token
    piece = tl.cdiv(tl.cdiv(seq_len, num_splits), BLOCK_N) * BLOCK_N
    low = split * piece
    high = tl.minimum(low + piece, seq_len)

    cols, rope_cols = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    col_ok, rope_ok = cols < latent, rope_cols < rope
    q_row = q_ptr + seq * q_batch_stride + token.to(tl.int64) * q_token_stride + head * q_head_stride
    q_latent = tl.load(q_row[:, None] + cols[None, :], row_ok[:, None] & col_ok[None, :], other=0.0)
    q_rope = tl.load(q_row[:, None] + latent + rope_cols[None, :], row_ok[:, None] & rope_ok[None, :], other=0.0)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    for start in range(low, high, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        ok = position < high
        page = tl.load(table_ptr + seq * table_stride + position // page_size, ok, other=0).to(tl.int64)
        entry = cache_ptr + (page * page_size + position % page_size) * (latent + rope)
        key = tl.load(entry[:, None] + cols[None, :], ok[:, None] & col_ok[None, :], other=0.0)
        key_rope = tl.load(entry[:, None] + latent + rope_cols[None, :], ok[:, None] & rope_ok[None, :], other=0.0)
        scores = tl.dot(q_latent, tl.trans(key), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(key_rope), scores, input_precision="ieee") * scale
        scores = tl.where(ok[None, :] & (position[None, :] < visible[:, None]), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
        probs = tl.exp(scores - finite[:, None])
        decay = tl.exp(top - finite)
        total = total * decay + tl.sum(probs, 1)
        acc = tl.dot(probs.to(key.dtype), key, acc * decay[:, None], input_precision="ieee")
        top = new_top

    place = (split * tl.num_programs(0) + seq) * num_rows + rows
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + place[:, None] * latent + cols[None, :], out.to(out_ptr.dtype.element_ty), row_ok[:, None] & col_ok[None, :])
    tl.store(lse_ptr + place, tl.where(total == 0.0, float("-inf"), top + tl.log(total)), row_ok)


@triton.jit
def join_splits_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, num_rows, latent, num_splits, BLOCK_SPLITS: tl.constexpr, BLOCK_L: tl.constexpr
):
    """Grid (B * rows,). part `[splits, B * rows, L]` fp32 and part_lse `[splits, B * rows]` -> out `[B * rows, L]`, lse."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK_SPLITS)
    lse = tl.load(part_lse_ptr + splits.to(tl.int64) * num_rows + row, splits < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    finite = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lse - finite), 0)
    cols = tl.arange(0, BLOCK_L)
    acc = tl.zeros((BLOCK_L,), tl.float32)
    for split in range(num_splits):
        place = row + split * num_rows
        weight = tl.exp(tl.load(part_lse_ptr + place) - finite)
        acc += weight * tl.load(part_ptr + place * latent + cols, cols < latent, other=0.0)
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * latent + cols, out.to(out_ptr.dtype.element_ty), cols < latent)
    tl.store(lse_ptr + row, tl.where(total == 0.0, float("-inf"), finite + tl.log(total)))
