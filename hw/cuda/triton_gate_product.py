"""Gate logits: bf16 or fp32 rows times an fp32 weight, exact to fp32 roundings.

A bf16 value is one of fp32; an fp32 weight is the sum of three bf16 values, 8 bits of its mantissa each. So three products on the bf16
matrix units give each product exactly, and their sums are kept in fp32.
"""

import triton
import triton.language as tl

from hw.cuda.launch import launched


@launched
@triton.jit(do_not_specialize=["num_rows", "blocks_per_split"])
def gate_product_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, num_experts, inner, x_stride, blocks_per_split,
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of experts, tiles of rows, splits of K). x `[T, K]` bf16, weight `[E, K]` contiguous, out `[splits, T, E]`."""
    e, t = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    e_ok, t_ok = e < num_experts, t < num_rows
    low = tl.program_id(2) * blocks_per_split
    high = tl.minimum(low + blocks_per_split, tl.cdiv(inner, BLOCK_K))
    acc = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    for block in range(low, high):
        ks = block * BLOCK_K + k
        k_ok = ks < inner
        w = tl.load(weight_ptr + e[:, None] * inner + ks[None, :], e_ok[:, None] & k_ok[None, :], other=0.0)
        x = tl.load(x_ptr + t.to(tl.int64)[None, :] * x_stride + ks[:, None], t_ok[None, :] & k_ok[:, None], other=0.0)
        high_part = w.to(x.dtype)
        rest = w - high_part.to(tl.float32)
        middle_part = rest.to(x.dtype)
        low_part = (rest - middle_part.to(tl.float32)).to(x.dtype)
        part = tl.dot(low_part, x)
        part = tl.dot(middle_part, x, part)
        # The matrix units cut bits off when they add; what they add up is kept short, and added here.
        acc += tl.dot(high_part, x, part)
    place = (tl.program_id(2) * num_rows + t).to(tl.int64) * num_experts
    tl.store(out_ptr + place[None, :] + e[:, None], acc, t_ok[None, :] & e_ok[:, None])
