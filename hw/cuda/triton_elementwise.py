"""Triton kernels that pass once over rows: norms, rotation, SwiGLU, the latent's way into its cache."""

import triton
import triton.language as tl

from hw.cuda.launch import launched
from hw.cuda.triton_quantize import store_quantized


@triton.jit
def normed_row(x, weight, width, eps):
    """`x * rsqrt(mean(x^2) + eps)` in fp32, rounded to x's dtype, times weight, rounded again: as `hw.api` writes it."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    return ((wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


# Arguments that are not specialised change from step to step: the kernels are compiled once for all of them.
@launched
@triton.jit(do_not_specialize=["scale_stride"])
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, data_ptr, scale_ptr, sum_ptr, x_stride, residual_stride, scale_stride, width, eps,
    HAS_RESIDUAL: tl.constexpr, DENSE: tl.constexpr, QUANT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). With a residual the sum is rounded to the model dtype, stored and normed. Stores the norm dense, quantised or both."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * x_stride + cols, mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + cols, x, mask)
    normed = normed_row(x, tl.load(weight_ptr + cols, mask, other=0.0), width, eps)
    if DENSE:
        tl.store(out_ptr + row * width + cols, normed, mask)
    if QUANT:
        store_quantized(normed, data_ptr + row * width, scale_ptr + row, scale_stride, width, BLOCK)


@triton.jit
def rotated(x_ptr, table_ptr, pairs, half, mask):
    """Rotate neighbouring pairs of what x_ptr points at, `[..., 2 * half]`; table_ptr: cos | sin of one position."""
    a = tl.load(x_ptr + 2 * pairs, mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + 2 * pairs + 1, mask, other=0.0).to(tl.float32)
    cos = tl.load(table_ptr + pairs, mask, other=0.0)
    sin = tl.load(table_ptr + half + pairs, mask, other=0.0)
    return a * cos - b * sin, b * cos + a * sin


@launched
@triton.jit
def rope_kernel(
    x_ptr, positions_ptr, table_ptr, out_ptr, token_stride, head_stride, out_token_stride, out_head_stride, num_heads, half,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of heads). A program reads all that it writes before it writes, so out may be x."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    cols = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    mask = (heads < num_heads) & (cols < 2 * half)
    x = tl.load(x_ptr + token * token_stride + heads * head_stride + cols, mask, other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(x, (BLOCK_HEADS, BLOCK_HALF, 2)))
    pairs = tl.arange(0, BLOCK_HALF)
    table_row = table_ptr + tl.load(positions_ptr + token) * 2 * half + pairs
    cos = tl.load(table_row, pairs < half, other=0.0)[None, :]
    sin = tl.load(table_row + half, pairs < half, other=0.0)[None, :]
    out = tl.interleave(a * cos - b * sin, b * cos + a * sin)
    tl.store(out_ptr + token * out_token_stride + heads * out_head_stride + cols, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def swiglu(gate, up):
    """`silu(gate) * up`, each rounded to the model dtype."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul(x_ptr, out_ptr, scale_ptr, scale_place, scale_stride, inner, first, QUANT: tl.constexpr, BLOCK: tl.constexpr):
    """Columns from `first` on of one row, whose scales begin at scale_place."""
    cols = first + tl.arange(0, BLOCK)
    mask = cols < inner
    gate = tl.load(x_ptr + cols, mask, other=0.0)
    up = tl.load(x_ptr + inner + cols, mask, other=0.0)
    product = swiglu(gate, up)
    if QUANT:
        store_quantized(product, out_ptr + first, scale_ptr + scale_place + first // 128 * scale_stride, scale_stride, inner - first, BLOCK)
    else:
        tl.store(out_ptr + cols, product, mask)


@launched
@triton.jit(do_not_specialize=["at_once", "scale_expert_stride", "scale_stride"])
def silu_mul_kernel(
    x_ptr, out_ptr, scale_ptr, counts_ptr, inner, at_once, x_expert_stride, x_stride, out_expert_stride, scale_expert_stride, scale_stride,
    HAS_COUNTS: tl.constexpr, QUANT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (experts * at_once, blocks of columns); x `[E, capacity, 2 * inner]`, gate first. Without counts at_once is the capacity.

    With counts a program takes every at_once-th of the `counts[e]` rows, so that a capacity of which little is used costs little.
    """
    expert, row, first = tl.program_id(0).to(tl.int64) // at_once, tl.program_id(0) % at_once, tl.program_id(1) * BLOCK
    x_ptr += expert * x_expert_stride
    out_ptr += expert * out_expert_stride
    place = expert * scale_expert_stride
    if HAS_COUNTS:
        for each in range(row, tl.load(counts_ptr + expert), at_once):
            _silu_mul(x_ptr + each * x_stride, out_ptr + each * inner, scale_ptr, place + each, scale_stride, inner, first, QUANT, BLOCK)
    else:
        _silu_mul(x_ptr + row * x_stride, out_ptr + row * inner, scale_ptr, place + row, scale_stride, inner, first, QUANT, BLOCK)


@launched
@triton.jit(do_not_specialize=["scale_stride"])
def latent_write_kernel(
    down_ptr, q_weight_ptr, weight_ptr, positions_ptr, table_ptr, slots_ptr, cache_ptr, q_ptr, q_scale_ptr, latent_ptr, key_ptr,
    stride, scale_stride, q_rank, rank, half, eps,
    HAS_Q: tl.constexpr, QUANT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, 2 with a query's latent, else 1).

    Program 0 norms the keys' latent, rotates the key, and stores them three times: latent, key, and both in the cache, which is contiguous,
    at the token's slot. Program 1 norms the query's latent, and quantises it if QUANT.
    """
    token = tl.program_id(0).to(tl.int64)
    if HAS_Q:  # noqa: SIM102  (this one is the compiler's)
        if tl.program_id(1) == 1:
            cols = tl.arange(0, BLOCK_Q)
            mask = cols < q_rank
            x = tl.load(down_ptr + token * stride + cols, mask, other=0.0)
            normed = normed_row(x, tl.load(q_weight_ptr + cols, mask, other=0.0), q_rank, eps)
            if QUANT:
                store_quantized(normed, q_ptr + token * q_rank, q_scale_ptr + token, scale_stride, q_rank, BLOCK_Q)
            else:
                tl.store(q_ptr + token * q_rank + cols, normed, mask)
            return
    kv_ptr = down_ptr + token * stride + q_rank
    slot = tl.load(slots_ptr + token)
    entry = cache_ptr + slot * (rank + 2 * half)
    cols = tl.arange(0, BLOCK_RANK)
    mask = cols < rank
    x = tl.load(kv_ptr + cols, mask, other=0.0)
    latent = normed_row(x, tl.load(weight_ptr + cols, mask, other=0.0), rank, eps)
    tl.store(latent_ptr + token * rank + cols, latent, mask)
    tl.store(entry + cols, latent, mask & (slot >= 0))
    pairs = tl.arange(0, BLOCK_HALF)
    mask = pairs < half
    table_row = table_ptr + tl.load(positions_ptr + token) * 2 * half
    first, second = rotated(kv_ptr + rank, table_row, pairs, half, mask)
    first, second = first.to(x.dtype), second.to(x.dtype)
    key = key_ptr + token * 2 * half + 2 * pairs
    tl.store(key, first, mask)
    tl.store(key + 1, second, mask)
    tl.store(entry + rank + 2 * pairs, first, mask & (slot >= 0))
    tl.store(entry + rank + 2 * pairs + 1, second, mask & (slot >= 0))


@launched
@triton.jit
def spread_key_kernel(
    key_ptr, out_ptr, key_stride, out_token_stride, out_head_stride, num_heads, dim, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr
):  # fmt: skip
    """Grid (tokens, blocks of heads). Copy each token's one key to every head."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    cols = tl.arange(0, BLOCK_DIM)[None, :]
    key = tl.load(key_ptr + token * key_stride + cols, cols < dim)
    out = out_ptr + token * out_token_stride + heads * out_head_stride + cols
    tl.store(out, tl.broadcast_to(key, (BLOCK_HEADS, BLOCK_DIM)), (heads < num_heads) & (cols < dim))


@launched
@triton.jit
def latent_gather_kernel(
    cache_ptr, table_ptr, places_ptr, out_ptr, num_seqs, table_stride, page_size, dim, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Grid (sequences, blocks of rows). places `[3, num_seqs]` int64: first token, number of tokens, first output row."""
    seq = tl.program_id(0).to(tl.int64)
    first = tl.load(places_ptr + seq)
    length = tl.load(places_ptr + num_seqs + seq)
    out_row = tl.load(places_ptr + 2 * num_seqs + seq)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = rows < length
    position = first + rows
    page = tl.load(table_ptr + seq * table_stride + position // page_size, real, other=0).to(tl.int64)
    slot = page * page_size + position % page_size
    cols = tl.arange(0, BLOCK_DIM)[None, :]
    mask = real[:, None] & (cols < dim)
    values = tl.load(cache_ptr + slot[:, None] * dim + cols, mask)
    tl.store(out_ptr + (out_row + rows)[:, None] * dim + cols, values, mask)
