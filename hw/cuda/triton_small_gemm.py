"""Products of few rows with large weights, where reading the weight is all the work: the weight's rows take the side of the matrix units
that is wide, the few activations the other one, and K is cut so that enough bytes are on their way.

    row_kernel         one row at a time, all of K at once, no matrix units
    few_rows_kernel    the warps of a program cut K among them and add up at the end
    split_k_kernel     programs cut K among them and leave partial sums, which sum_splits_kernel adds in order

FP8: weights e4m3 with a scale for each 128 x 128, activations e4m3 with a scale for each row's 128 channels; the products of 128 channels
are summed first, then scaled, then added in fp32.
"""

import triton
import triton.language as tl

from hw.cuda.launch import launched


@launched
@triton.jit
def row_kernel(x_ptr, weight_ptr, out_ptr, outer, inner, x_stride, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Grid (tiles of weight rows, rows). Weight `[outer, inner]` and out `[rows, outer]` contiguous; BLOCK_K holds all channels.

    Products and sums are in fp32, so a weight in fp32 gives the product in fp32.
    """
    n, k, row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.program_id(1).to(tl.int64)
    n_ok, k_ok = n < outer, k < inner
    w = tl.load(weight_ptr + n.to(tl.int64)[:, None] * inner + k[None, :], n_ok[:, None] & k_ok[None, :], other=0.0)
    x = tl.load(x_ptr + row * x_stride + k, k_ok, other=0.0)
    out = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    tl.store(out_ptr + row * outer + n, out.to(out_ptr.dtype.element_ty), n_ok)


@triton.jit
def _scales(ws_ptr, xs_ptr, block, num_blocks, first_row, num_rows, xs_stride, SPLIT: tl.constexpr, BLOCK_T: tl.constexpr):
    """Of weight and activations in SPLIT blocks of channels, `[SPLIT, BLOCK_T]`; 0 beyond the last."""
    blocks, t = block + tl.arange(0, SPLIT), first_row + tl.arange(0, BLOCK_T)
    ok = blocks < num_blocks
    of_weight = tl.load(ws_ptr + blocks, ok, other=0.0)
    of_rows = tl.load(xs_ptr + blocks[:, None] * xs_stride + t[None, :], ok[:, None] & (t < num_rows)[None, :], other=0.0)
    return of_weight[:, None] * of_rows


@launched
@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x_ptr, xs_ptr, weight_ptr, ws_ptr, out_ptr, counts_ptr, num_rows, outer, inner, x_expert_stride, xs_expert_stride, xs_stride,
    out_expert_stride,
    MASKED: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of weight rows, tiles of rows, experts). x and out rows contiguous, weight `[E, outer, inner]` contiguous.

    masked: expert e has `counts[e]` rows, at most `num_rows`. SCALED: FP8, BLOCK_K 128. SPLIT warps take BLOCK_K channels each at a time;
    EVEN: no block of channels is left over. BLOCK_N divides 128.
    """
    first = tl.program_id(1) * BLOCK_T
    expert = tl.program_id(2).to(tl.int64)
    if MASKED:
        num_rows = tl.load(counts_ptr + expert).to(tl.int32)
        if first >= num_rows:
            return
    num_blocks = inner // BLOCK_K
    x_ptr += expert * x_expert_stride
    out_ptr += expert * out_expert_stride
    weight_ptr += expert * outer * inner
    if SCALED:
        xs_ptr += expert * xs_expert_stride
        ws_ptr += (expert * tl.cdiv(outer, 128) + tl.program_id(0) * BLOCK_N // 128) * num_blocks
    split, k = tl.arange(0, SPLIT), tl.arange(0, BLOCK_K)
    n, t = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), first + tl.arange(0, BLOCK_T)
    t_ok = t < num_rows
    rows = tl.minimum(n, outer - 1).to(tl.int64)  # what a tile has too many is read twice and not stored
    w_tile = weight_ptr + split[:, None, None] * BLOCK_K + rows[None, :, None] * inner + k[None, None, :]
    x_tile = x_ptr + split[:, None, None] * BLOCK_K + t.to(tl.int64)[None, None, :] * inner + k[None, :, None]
    acc = tl.zeros((SPLIT, BLOCK_N, BLOCK_T), tl.float32)
    if SCALED:
        scale = _scales(ws_ptr, xs_ptr, 0, num_blocks, first, num_rows, xs_stride, SPLIT, BLOCK_T)
    for block in range(0, num_blocks, SPLIT):
        if EVEN:
            w = tl.load(w_tile + block * BLOCK_K)
            x = tl.load(x_tile + block * BLOCK_K, t_ok[None, None, :], other=0.0)
        else:
            ok = block + split < num_blocks
            w = tl.load(w_tile + block * BLOCK_K, ok[:, None, None], other=0.0)
            x = tl.load(x_tile + block * BLOCK_K, ok[:, None, None] & t_ok[None, None, :], other=0.0)
        if SCALED:
            # The next scales are on their way while this block is at work.
            coming = _scales(ws_ptr, xs_ptr, block + SPLIT, num_blocks, first, num_rows, xs_stride, SPLIT, BLOCK_T)
            acc += tl.dot(w, x) * scale[:, None, :]
            scale = coming
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee")
    out = tl.sum(acc, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + t.to(tl.int64)[None, :] * outer + n[:, None], out, t_ok[None, :] & (n < outer)[:, None])


@triton.jit(do_not_specialize=["num_rows", "blocks_per_split"])
def split_k_kernel(
    x_ptr, xs_ptr, weight, ws_ptr, out_ptr, num_rows, outer, inner, xs_stride, blocks_per_split,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of weight rows, tiles of rows, splits). weight: descriptor of `[outer, inner]` e4m3 in boxes `[BLOCK_N, 128]`.

    x `[num_rows, inner]` contiguous; out `[splits, num_rows, outer]`, fp32 if there are several splits. BLOCK_N divides 128.
    """
    first_n, first_t = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_T
    num_blocks = inner // 128
    low = tl.program_id(2) * blocks_per_split
    high = tl.minimum(low + blocks_per_split, num_blocks)
    n, t, k = first_n + tl.arange(0, BLOCK_N), first_t + tl.arange(0, BLOCK_T), tl.arange(0, 128)
    t_ok = t < num_rows
    x_tile = x_ptr + t.to(tl.int64)[None, :] * inner + k[:, None]
    ws_ptr += first_n // 128 * num_blocks
    xs_ptr += t
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    scale = tl.load(ws_ptr + low) * tl.load(xs_ptr + low * xs_stride, t_ok, other=0.0)
    for block in range(low, high):
        w = weight.load([first_n, block * 128])
        x = tl.load(x_tile + block * 128, t_ok[None, :], other=0.0)
        more = block + 1 < high
        coming = tl.load(ws_ptr + block + 1, more, other=0.0) * tl.load(xs_ptr + (block + 1) * xs_stride, t_ok & more, other=0.0)
        acc += tl.dot(w, x) * scale[None, :]
        scale = coming
    place = (tl.program_id(2) * num_rows + t).to(tl.int64) * outer
    tl.store(out_ptr + place[None, :] + n[:, None], acc.to(out_ptr.dtype.element_ty), t_ok[None, :] & (n < outer)[:, None])


@launched
@triton.jit(do_not_specialize=["num_splits"])
def sum_splits_kernel(part_ptr, out_ptr, size, num_splits, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks of elements,). part `[num_splits, size]` fp32 -> out `[size]`, in the order of the splits."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    part = tl.load(
        part_ptr + split.to(tl.int64)[:, None] * size + i[None, :], (split < num_splits)[:, None] & (i < size)[None, :], other=0.0
    )
    tl.store(out_ptr + i, tl.sum(part, 0).to(out_ptr.dtype.element_ty), i < size)
