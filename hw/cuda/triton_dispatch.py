"""Triton kernels that bring rows to experts and back on one rank."""

import triton
import triton.language as tl

from hw.cuda.launch import launched


# Arguments that are not specialised change from step to step: the kernels are compiled once for all of them.
@launched
@triton.jit(do_not_specialize=["num_rows"])
def count_kernel(topk_ptr, counts_ptr, num_rows, BLOCK: tl.constexpr):
    """Grid (experts, blocks of rows): how many (token, k) rows of each block an expert gets, `[experts, blocks]` int32."""
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(topk_ptr + rows, rows < num_rows, other=-1) == tl.program_id(0)
    tl.store(counts_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(mine.to(tl.int32), 0))


@launched
@triton.jit(do_not_specialize=["num_rows", "capacity"])
def place_kernel(
    topk_ptr, block_counts_ptr, home_ptr, counts_ptr, ends_ptr, num_rows, capacity, align,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid as `count_kernel`'s, whose result is block_counts. Each (token, k) row's home, in the order of the batch, and rows per expert.

    An expert's first row is `expert * capacity`, or without a capacity where the one before ends, rounded up to a multiple of `align`;
    these ends are stored too, `[experts]`, unless ends_ptr is None.
    """
    expert, block, num_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    experts, blocks = tl.arange(0, EXPERTS)[:, None], tl.arange(0, BLOCKS)[None, :]
    real = (experts < tl.num_programs(0)) & (blocks < num_blocks)
    each = tl.load(block_counts_ptr + experts * num_blocks + blocks, real, other=0)
    before = tl.sum(tl.sum(tl.where((experts == expert) & (blocks < block), each, 0), 1), 0)
    first = expert.to(tl.int64) * capacity
    if capacity == 0:
        padded = (tl.sum(each, 1) + align - 1) // align * align
        first += tl.sum(tl.where(tl.arange(0, EXPERTS) < expert, padded, 0), 0)
        if ends_ptr is not None:
            tl.store(ends_ptr + expert, (first + tl.sum(tl.where(tl.arange(0, EXPERTS) == expert, padded, 0), 0)).to(tl.int32))
    rows = block * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(topk_ptr + rows, rows < num_rows, other=-1) == expert
    tl.store(home_ptr + rows, first + before + tl.cumsum(mine.to(tl.int32), 0) - 1, mine)
    if block == 0:
        tl.store(counts_ptr + expert, tl.sum(tl.sum(tl.where(experts == expert, each, 0), 1), 0))


@triton.jit
def _num_before(topk_ptr, end, expert, BLOCK: tl.constexpr):
    """How many of the first `end` (token, k) rows an expert gets."""
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, end, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        total += (tl.load(topk_ptr + rows, rows < end, other=-1) == expert).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _expert_and_row(home, capacity):
    """Homes fit 32 bits, in which a division takes a fraction of what it takes in 64, most of all of negative numbers."""
    small = home.to(tl.int32)
    return (small // capacity).to(tl.int64), (small % capacity).to(tl.int64)


@launched
@triton.jit(do_not_specialize=["scale_stride", "group_stride", "num_rows", "capacity", "scale_expert_stride", "out_scale_stride"])
def scatter_rows_kernel(
    x_ptr, scale_ptr, topk_ptr, home_ptr, out_ptr, out_scale_ptr, experts_ptr, counts_ptr, x_stride, scale_stride,
    group_stride, num_rows, capacity, expert_stride, scale_expert_stride, out_scale_stride, width,
    TOP_K: tl.constexpr, PLACE: tl.constexpr, QUANT: tl.constexpr, HAS_EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a token's row, and its scales, to its homes. HAS_EXPERTS: note each copied row's expert.

    A home is `expert * capacity + row`; an expert of -1 has none. Grid (tokens,) if homes are given. PLACE: grid (tokens * top-k +
    experts,); a program finds one home, with rows in the order of the batch, and stores it; those beyond the rows count them.
    """
    COPIES: tl.constexpr = 1 if PLACE else TOP_K
    row = tl.program_id(0) * COPIES
    if PLACE:  # noqa: SIM102  (these are the compiler's)
        if row >= num_rows:
            tl.store(counts_ptr + row - num_rows, _num_before(topk_ptr, num_rows, row - num_rows, 1024))
            return
    token = (row // TOP_K).to(tl.int64)
    for first in range(0, width, BLOCK):
        cols, groups = first + tl.arange(0, BLOCK), first // 128 + tl.arange(0, BLOCK // 128)
        values = tl.load(x_ptr + token * x_stride + cols, cols < width)
        if QUANT:
            scale = tl.load(scale_ptr + token * scale_stride + groups * group_stride, groups * 128 < width)
        for k in tl.static_range(COPIES):
            expert = tl.load(topk_ptr + row + k)
            real = expert >= 0
            if PLACE:
                home = expert * capacity + _num_before(topk_ptr, token * TOP_K, expert, 1024)
                tl.store(home_ptr + row, home, real)
            else:
                home = tl.load(home_ptr + row + k, real, other=0)
            if HAS_EXPERTS:
                tl.store(experts_ptr + home, expert.to(tl.int32), real)
            there, local = _expert_and_row(home, capacity)
            tl.store(out_ptr + there * expert_stride + local * width + cols, values, (cols < width) & real)
            if QUANT:
                out_scale = out_scale_ptr + there * scale_expert_stride + local + groups * out_scale_stride
                tl.store(out_scale, scale, (groups * 128 < width) & real)


@launched
@triton.jit(do_not_specialize=["capacity"])
def combine_kernel(
    y_ptr, home_ptr, weight_ptr, shared_ptr, out_ptr, capacity, expert_stride, width,
    TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of columns). The reduction rule: weight * row in top-k order in fp32, then the shared experts' row.

    A home of -1 brings nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        home = tl.load(home_ptr + token * TOP_K + k)
        there, local = _expert_and_row(home, capacity)
        row = tl.load(y_ptr + there * expert_stride + local * width + cols, mask & (home >= 0), other=0.0)
        total += row.to(tl.float32) * tl.load(weight_ptr + token * TOP_K + k)
    if HAS_SHARED:
        total += tl.load(shared_ptr + token * width + cols, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + cols, total.to(out_ptr.dtype.element_ty), mask)
