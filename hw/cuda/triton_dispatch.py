"""Triton kernels that bring rows to experts and back on one rank."""

import triton
import triton.language as tl


@triton.jit
def place_kernel(topk_ptr, rank_ptr, counts_ptr, num_rows, BLOCK: tl.constexpr):
    """Grid (experts,). How many (token, k) rows an expert gets, and each row's rank among them, in the order of the batch."""
    expert = tl.program_id(0)
    count = tl.zeros((), tl.int64)
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mine = tl.load(topk_ptr + rows, rows < num_rows, other=-1) == expert
        ones = mine.to(tl.int64)
        tl.store(rank_ptr + rows, count + tl.cumsum(ones, 0) - 1, mine)
        count += tl.sum(ones, 0)
    tl.store(counts_ptr + expert, count)


@triton.jit
def home_of(home_ptr, capacity, expert_stride, width):
    """First element of the row that a home, `expert * capacity + row`, names."""
    home = tl.load(home_ptr)
    return home // capacity * expert_stride + home % capacity * width


@triton.jit
def scatter_rows_kernel(
    x_ptr, home_ptr, out_ptr, x_stride, capacity, expert_stride, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (tokens, blocks of columns). Copy a token's row to its `TOP_K` homes."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    row = tl.load(x_ptr + token * x_stride + cols, mask)
    for k in tl.static_range(TOP_K):
        tl.store(out_ptr + home_of(home_ptr + token * TOP_K + k, capacity, expert_stride, width) + cols, row, mask)


@triton.jit
def combine_kernel(
    y_ptr, home_ptr, weight_ptr, shared_ptr, out_ptr, capacity, expert_stride, width,
    TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of columns). The reduction rule: weight * row in top-k order in fp32, then the shared experts' row."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(y_ptr + home_of(home_ptr + token * TOP_K + k, capacity, expert_stride, width) + cols, mask, other=0.0)
        total += row.to(tl.float32) * tl.load(weight_ptr + token * TOP_K + k)
    if HAS_SHARED:
        total += tl.load(shared_ptr + token * width + cols, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + cols, total.to(out_ptr.dtype.element_ty), mask)
