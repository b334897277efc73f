"""Triton kernels around what ranks send each other."""

import triton
import triton.language as tl


@triton.jit
def sum_parts_kernel(parts_ptr, out_ptr, num, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks,). Sum of `PARTS` runs of `num` elements one behind the other, in fp32 and in their order, rounded once."""
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num
    total = tl.load(parts_ptr + cols, mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * num + cols, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask)
