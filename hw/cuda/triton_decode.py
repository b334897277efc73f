"""Paged absorbed attention for any latent size: the key is read once and its first L values are the value.

One program attends a block of (query, head) rows of one sequence over one piece ("split") of its pages; a second kernel joins the splits.

    rows of a sequence, j * num_heads + h      its tokens, in splits of whole key tiles
    | block of BLOCK_M rows |     x            | split 0 | split 1 | ... |

A split that a short sequence does not reach writes its lse alone, -inf, and the join does not read the rest.
"""

import triton
import triton.language as tl

from hw.cuda.launch import launched

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(q_latent, q_rope, entry, ok, visible, position, top, total, acc, latent, rope, scale,
            BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """One tile of keys at `entry` `[BLOCK_N]`. `scale` includes log2(e)."""
    cols, rope_cols = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    key_ok, key_rope_ok = ok[:, None], ok[:, None]
    if not EXACT:
        key_ok, key_rope_ok = key_ok & (cols < latent)[None, :], key_rope_ok & (rope_cols < rope)[None, :]
    key = tl.load(entry[:, None] + cols[None, :], key_ok, other=0.0)
    key_rope = tl.load(entry[:, None] + latent + rope_cols[None, :], key_rope_ok, other=0.0)
    scores = tl.dot(q_latent, tl.trans(key), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(key_rope), scores, input_precision="ieee") * scale
    scores = tl.where(ok[None, :] & (position[None, :] < visible[:, None]), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
    probs = tl.exp2(scores - finite[:, None])
    decay = tl.exp2(top - finite)
    acc = tl.dot(probs.to(key.dtype), key, acc * decay[:, None], input_precision="ieee")
    return new_top, total * decay + tl.sum(probs, 1), acc


@launched
@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def decode_kernel(
    q_ptr, cache_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, q_batch_stride, q_token_stride, q_head_stride, table_stride,
    num_heads, num_rows, query_len, page_size, latent, rope, scale, num_splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, EXACT: tl.constexpr,
    ONE_PAGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, splits, sequences). out `[splits, B, rows, L]`, lse `[splits, B, rows]`; cache contiguous.

    EXACT: the latent fills BLOCK_L and the rope BLOCK_R. ONE_PAGE: a tile of keys lies in one page. SPLIT: there is more than one split.
    """
    split, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < num_rows
    place = (split * tl.num_programs(2) + seq) * num_rows + rows
    seq_len = tl.load(lens_ptr + seq)
    piece = tl.cdiv(tl.cdiv(seq_len, num_splits), BLOCK_N) * BLOCK_N
    low = split * piece
    high = tl.minimum(low + piece, seq_len)
    if SPLIT:  # noqa: SIM102  (this one is the compiler's)
        if low >= high:
            tl.store(lse_ptr + place, float("-inf"), row_ok)
            return
    token, head = rows // num_heads, rows % num_heads
    visible = seq_len - query_len + 1 + token
    cols, rope_cols = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    q_row = q_ptr + seq * q_batch_stride + token.to(tl.int64) * q_token_stride + head * q_head_stride
    q_latent = tl.load(q_row[:, None] + cols[None, :], row_ok[:, None] & (cols < latent)[None, :], other=0.0)
    q_rope = tl.load(q_row[:, None] + latent + rope_cols[None, :], row_ok[:, None] & (rope_cols < rope)[None, :], other=0.0)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # of scores in units of log 2
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    pages = table_ptr + seq * table_stride
    page = tl.load(pages + low // page_size, low < high, other=0).to(tl.int64)
    for start in range(low, high, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        ok = position < high
        if ONE_PAGE:
            entry = cache_ptr + (page * page_size + position % page_size) * (latent + rope)
            # The next tile's page is fetched while this tile is at work.
            page = tl.load(pages + (start + BLOCK_N) // page_size, start + BLOCK_N < high, other=0).to(tl.int64)
        else:
            each = tl.load(pages + position // page_size, ok, other=0).to(tl.int64)
            entry = cache_ptr + (each * page_size + position % page_size) * (latent + rope)
        top, total, acc = _attend(
            q_latent, q_rope, entry, ok, visible, position, top, total, acc, latent, rope, scale * LOG2_E, BLOCK_L, BLOCK_R, EXACT
        )  # fmt: skip

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_ptr + place[:, None] * latent + cols[None, :], out.to(out_ptr.dtype.element_ty), row_ok[:, None] & (cols < latent)[None, :]
    )
    tl.store(lse_ptr + place, tl.where(total == 0.0, float("-inf"), (top + tl.log2(total)) * LN_2), row_ok)


@launched
@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def join_splits_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, num_rows, latent, num_splits,
    BLOCK_SPLITS: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Grid (B * rows, blocks of columns). part `[splits, B * rows, L]` and part_lse `[splits, B * rows]` -> out `[B * rows, L]`, lse."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    col_ok = cols < latent
    place = tl.arange(0, BLOCK_SPLITS).to(tl.int64) * num_rows + row
    lse = tl.load(part_lse_ptr + place, tl.arange(0, BLOCK_SPLITS) < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    finite = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(lse - finite)
    total = tl.sum(weight, 0)
    wrote = lse > float("-inf")
    part = tl.load(part_ptr + place[:, None] * latent + cols[None, :], wrote[:, None] & col_ok[None, :], other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * latent + cols, out.to(out_ptr.dtype.element_ty), col_ok)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + row, tl.where(total == 0.0, float("-inf"), finite + tl.log(total)))
