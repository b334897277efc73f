"""FP8 quantisation of activations as `hw.quant` does it, in the layout DeepGEMM wants: scales lie column by column."""

import triton
import triton.language as tl

from hw.cuda.launch import launched


@triton.jit
def quantized(x):
    """Groups x `[..., 128]` fp32 -> their e4m3 values, still in fp32, and scales `[...]`."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), -1), 1e-4), 448.0)
    scaled = tl.div_rn(x, tl.broadcast_to(tl.expand_dims(scale, -1), x.shape))
    return tl.minimum(tl.maximum(scaled, -448.0), 448.0), scale


@triton.jit
def store_quantized(x, data_ptr, scale_ptr, scale_stride, width, BLOCK: tl.constexpr):
    """Quantise a row x `[BLOCK]`, of which `width` are real, both multiples of 128; data_ptr and scale_ptr: its first element and scale."""
    groups = tl.arange(0, BLOCK // 128)
    values, scale = quantized(tl.reshape(x.to(tl.float32), (BLOCK // 128, 128)))
    real = groups * 128 < width
    cols = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(data_ptr + cols, values.to(data_ptr.dtype.element_ty), real[:, None])
    tl.store(scale_ptr + groups * scale_stride, scale, real)


# Compiled once for any number of rows.
@launched
@triton.jit(do_not_specialize=["capacity", "data_rows", "scale_stride"])
def quantize_kernel(
    x_ptr, counts_ptr, data_ptr, scale_ptr, x_expert_stride, x_stride, capacity, data_rows, scale_stride, num_groups,
    HAS_COUNTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of groups). x has `capacity` rows to an expert, data `data_rows`; rows of expert e beyond `counts[e]` are skipped.

    Scales lie column by column, `[experts, num_groups, scale_stride]`.
    """
    row = tl.program_id(0).to(tl.int64)
    expert, local = row // capacity, row % capacity
    if HAS_COUNTS:  # noqa: SIM102  (this one is the compiler's)
        if local >= tl.load(counts_ptr + expert):
            return
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    group_ok = groups < num_groups
    cols = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + expert * x_expert_stride + local * x_stride + cols, group_ok[:, None], other=0.0).to(tl.float32)
    data, scale = quantized(x)
    data_row = data_ptr + (expert * data_rows + local) * num_groups * 128
    tl.store(data_row + cols, data.to(data_ptr.dtype.element_ty), group_ok[:, None])
    tl.store(scale_ptr + (expert * num_groups + groups) * scale_stride + local, scale, group_ok)
