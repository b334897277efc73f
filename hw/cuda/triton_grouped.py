"""Grouped matrix products."""

import triton
import triton.language as tl


@triton.jit
def grouped_kernel(
    x_ptr, weight_ptr, out_ptr, counts_ptr, tiles_ptr, num_tiles, capacity, expert_rows, inner, outer,
    x_stride, expert_stride, weight_stride,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of columns): consecutive programs share a weight tile.

    masked: counts `[E]` on the device, at most `capacity` rows an expert, which start `expert_rows` apart in x and out; otherwise tiles
    `[3, num_tiles]` int32: expert, first row, number of rows.
    """
    tile = tl.program_id(0)
    if MASKED:
        tiles_per_expert = tl.cdiv(capacity, BLOCK_M)
        expert = tile // tiles_per_expert
        row = (tile % tiles_per_expert) * BLOCK_M
        num_rows = (tl.load(counts_ptr + expert) - row).to(tl.int32)
        row += expert * expert_rows
        if num_rows <= 0:
            return
    else:
        expert = tl.load(tiles_ptr + tile)
        row = tl.load(tiles_ptr + num_tiles + tile)
        num_rows = tl.load(tiles_ptr + 2 * num_tiles + tile)
    rows, cols, ks = tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row_ok, col_ok = rows < num_rows, cols < outer
    places = (row + rows).to(tl.int64)
    x_tile = x_ptr + places[:, None] * x_stride + ks[None, :]
    w_tile = weight_ptr + expert.to(tl.int64) * expert_stride + cols.to(tl.int64)[None, :] * weight_stride + ks[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inner, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_tile + start, row_ok[:, None], other=0.0)
            w = tl.load(w_tile + start, col_ok[None, :], other=0.0)
        else:
            k_ok = start + ks < inner
            x = tl.load(x_tile + start, row_ok[:, None] & k_ok[None, :], other=0.0)
            w = tl.load(w_tile + start, col_ok[None, :] & k_ok[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    out = out_ptr + places[:, None] * outer + cols[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), row_ok[:, None] & col_ok[None, :])
