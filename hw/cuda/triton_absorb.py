"""Products of each head with its own matrix, around absorbed attention: queries to latents with their rotation, latents to values."""

import triton
import triton.language as tl

from hw.cuda.launch import launched
from hw.cuda.triton_quantize import quantized


@triton.jit
def _rotate(
    q_ptr, positions_ptr, table_ptr, out_ptr, rows, row_ok, q_stride, out_stride, half, BLOCK_HALF: tl.constexpr, BLOCK_M: tl.constexpr
):
    """q_ptr, out_ptr: the rope dims of one head. As `hw.cuda.triton_elementwise.rope_kernel`."""
    cols = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    mask = row_ok[:, None] & (cols < 2 * half)
    x = tl.load(q_ptr + rows[:, None] * q_stride + cols, mask, other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_HALF, 2)))
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    table_rows = table_ptr + tl.load(positions_ptr + rows, row_ok, other=0)[:, None] * 2 * half + pairs
    cos = tl.load(table_rows, row_ok[:, None] & (pairs < half), other=0.0)
    sin = tl.load(table_rows + half, row_ok[:, None] & (pairs < half), other=0.0)
    out = tl.interleave(a * cos - b * sin, b * cos + a * sin)
    tl.store(out_ptr + rows[:, None] * out_stride + cols, out.to(out_ptr.dtype.element_ty), mask)


# Compiled once for any number of tokens.
@launched
@triton.jit(do_not_specialize=["num_tokens"])
def absorb_query_kernel(
    q_ptr, w_ptr, positions_ptr, table_ptr, out_ptr, num_tokens, q_stride, q_head_stride, w_head_stride, w_stride, out_stride,
    out_head_stride, nope, latent, half,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, latent tiles and one program for the rotation, heads).

    q `[T, H, nope + rope]`, w `[H, nope, latent]`, out `[T, H, latent + rope]`, everything contiguous in its last dim.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    row_ok = rows < num_tokens
    tile, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    q_ptr += head * q_head_stride
    out_ptr += head * out_head_stride
    if tile == tl.num_programs(1) - 1:
        _rotate(
            q_ptr + nope, positions_ptr, table_ptr, out_ptr + latent, rows, row_ok, q_stride, out_stride, half, BLOCK_HALF, BLOCK_M
        )  # fmt: skip
    else:
        ks = tl.arange(0, BLOCK_K)
        k_ok = ks < nope
        q = tl.load(q_ptr + rows[:, None] * q_stride + ks[None, :], row_ok[:, None] & k_ok[None, :], other=0.0)
        cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        col_ok = cols < latent
        w_ptr += head * w_head_stride
        w = tl.load(w_ptr + ks[:, None] * w_stride + cols[None, :], k_ok[:, None] & col_ok[None, :], other=0.0)
        out = tl.dot(q, w).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], out, row_ok[:, None] & col_ok[None, :])


@launched
@triton.jit(do_not_specialize=["num_tokens", "scale_stride"])
def unabsorb_kernel(
    x_ptr, w_ptr, out_ptr, scale_ptr, num_tokens, x_stride, x_head_stride, w_head_stride, w_stride, out_stride, scale_stride, value, latent,
    QUANT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, heads, blocks of values). x `[T, H, latent]`, w `[H, value, latent]`, out `[T, H * value]`; contiguous in
    their last dims.

    QUANT: a head is one group of 128 channels, in one block; out is e4m3 and scales `[H, scale_stride]`, rounded first to x's dtype, as
    `hw.quant` does.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    row_ok = rows < num_tokens
    head = tl.program_id(1).to(tl.int64)
    cols, ks = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    col_ok = cols < value
    x_tile = x_ptr + head * x_head_stride + rows[:, None] * x_stride + ks[None, :]
    w_tile = w_ptr + head * w_head_stride + cols[None, :] * w_stride + ks[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, latent, BLOCK_K, num_stages=NUM_STAGES):
        k_ok = start + ks < latent
        x = tl.load(x_tile + start, row_ok[:, None] & k_ok[None, :], other=0.0)
        w = tl.load(w_tile + start, col_ok[None, :] & k_ok[:, None], other=0.0)
        acc = tl.dot(x, w, acc)
    out = acc.to(x_ptr.dtype.element_ty)
    place = out_ptr + rows[:, None] * out_stride + head * value + cols[None, :]
    if QUANT:
        data, scale = quantized(out.to(tl.float32))
        tl.store(place, data.to(out_ptr.dtype.element_ty), row_ok[:, None] & col_ok[None, :])
        tl.store(scale_ptr + head * scale_stride + rows, scale, row_ok)
    else:
        tl.store(place, out, row_ok[:, None] & col_ok[None, :])
