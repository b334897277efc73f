"""Triton kernels that bring rows to experts and back through memory that all ranks of a host write to (`hw.cuda.peers`).

A home is an expert here and a row of it in one number, `expert << 16 | row`: two divisions for each would take longer than all the rest.
"""

import triton
import triton.language as tl

from hw.cuda.launch import launched


@triton.jit
def _packet(base, slot, op, num_slots, packet_words, HEADER: tl.constexpr):
    """Where one of a window's packets starts, an int32 pointer. base: address of the window, int64; op: counts what has travelled before,
    and picks one of two halves.
    """
    words = HEADER + ((op & 1) * num_slots + slot) * packet_words
    return tl.multiple_of((base + words * 4).to(tl.pointer_type(tl.int32)), 16)


@launched
@triton.jit(do_not_specialize=["num_tokens", "scale_stride", "group_stride", "rank", "num_local"])
def send_packets_kernel(
    x_ptr, scale_ptr, topk_ptr, weight_ptr, windows_ptr, op_ptr, counts_ptr, num_tokens, x_stride, scale_stride, group_stride,
    rank, num_local, cap, num_slots, packet_words, row_words, num_groups,
    TOP_K: tl.constexpr, KS: tl.constexpr, EXPERTS: tl.constexpr, HEADER: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens of the largest rank, ranks): a token's packet to a rank: its experts there (-1: elsewhere) and their weights and, if
    there are any, its row `[row_words]` int32 and its scales `[num_groups]` fp32. Also zeroes counts `[num_local]`.
    """
    token, peer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (token == 0) & (peer == 0):
        experts = tl.arange(0, EXPERTS)
        tl.store(counts_ptr + experts, 0, experts < num_local)
    packet = _packet(tl.load(windows_ptr + peer), rank * cap + token, tl.load(op_ptr), num_slots, packet_words, HEADER)
    ks = tl.arange(0, KS)
    real = (ks < TOP_K) & (token < num_tokens)
    local = tl.load(topk_ptr + token * TOP_K + ks, real, other=-1) - peer * num_local
    here = real & (local >= 0) & (local < num_local)
    tl.store(packet + ks, tl.where(here, local, -1).to(tl.int32), ks < TOP_K)
    weight = tl.load(weight_ptr + token * TOP_K + ks, here, other=0.0)
    tl.store((packet + KS).to(tl.pointer_type(tl.float32)) + ks, weight, ks < TOP_K)
    if tl.sum(here.to(tl.int32), 0) > 0:
        row = packet + 2 * KS
        for first in range(0, row_words, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            tl.store(row + cols, tl.load(x_ptr + token * x_stride + cols, cols < row_words), cols < row_words)
        if GROUPS:
            groups = tl.arange(0, GROUPS)
            scale = tl.load(scale_ptr + token * scale_stride + groups * group_stride, groups < num_groups)
            tl.store((row + row_words).to(tl.pointer_type(tl.float32)) + groups, scale, groups < num_groups)


@launched
@triton.jit(do_not_specialize=["rank"])
def meet_kernel(flags_ptr, windows_ptr, op_ptr, rank, size, RANKS: tl.constexpr):
    """Grid (1,): tell all ranks that what was written before is there, and wait until they have said so. Counts the op in op_ptr.

    flags `[size]` int64 begin each window: how often each rank has said it. Nobody can be ahead by more than one.
    """
    op = tl.load(op_ptr) + 1
    ranks = tl.arange(0, RANKS)
    real = ranks < size
    theirs = tl.load(windows_ptr + ranks, real, other=0).to(tl.pointer_type(tl.int64)) + rank
    tl.atomic_xchg(theirs, op, real, sem="release", scope="sys")
    num_late = size
    while num_late > 0:
        said = tl.atomic_add(flags_ptr + ranks, tl.zeros((RANKS,), tl.int64), real, sem="acquire", scope="sys")
        num_late = tl.sum((real & (said < op)).to(tl.int32), 0)
    tl.store(op_ptr, op)


@launched
@triton.jit(do_not_specialize=["rank"])
def place_packets_kernel(
    windows_ptr, op_ptr, counts_ptr, home_ptr, weight_ptr, out_ptr, out_scale_ptr, rank, most, cap, num_slots, packet_words,
    expert_stride, scale_expert_stride, group_stride, row_words, num_groups,
    TOP_K: tl.constexpr, KS: tl.constexpr, HEADER: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid (ranks * most,): copy a received row, and its scales, to each of its experts, in any order; counts them.

    out: rows of `row_words` int32, `expert_stride` int32 from one expert to the next. Home, -1: none, and weight of each (received token,
    k) row are stored, `[ranks * most, TOP_K]` int32 and fp32.
    """
    received = tl.program_id(0)
    slot = received // most * cap + received % most
    packet = _packet(tl.load(windows_ptr + rank), slot, tl.load(op_ptr) - 1, num_slots, packet_words, HEADER)
    ks = tl.arange(0, KS)
    expert = tl.load(packet + ks, ks < TOP_K, other=-1)
    real = expert >= 0
    place = tl.atomic_add(counts_ptr + expert, tl.full((KS,), 1, tl.int32), real, sem="relaxed")
    tl.store(home_ptr + received * TOP_K + ks, tl.where(real, expert << 16 | place, -1), ks < TOP_K)
    weight = tl.load((packet + KS).to(tl.pointer_type(tl.float32)) + ks, ks < TOP_K)
    tl.store(weight_ptr + received * TOP_K + ks, weight, ks < TOP_K)
    if tl.sum(real.to(tl.int32), 0) > 0:
        row = packet + 2 * KS
        for first in range(0, row_words, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            values = tl.load(row + cols, cols < row_words)
            for k in tl.static_range(TOP_K):
                to, at = tl.sum(tl.where(ks == k, expert, 0), 0), tl.sum(tl.where(ks == k, place, 0), 0)
                out = out_ptr + to.to(tl.int64) * expert_stride + at * row_words
                tl.store(out + cols, values, (cols < row_words) & (to >= 0))
        if GROUPS:
            groups = tl.arange(0, GROUPS)
            scale = tl.load((row + row_words).to(tl.pointer_type(tl.float32)) + groups, groups < num_groups)
            for k in tl.static_range(TOP_K):
                to, at = tl.sum(tl.where(ks == k, expert, 0), 0), tl.sum(tl.where(ks == k, place, 0), 0)
                out_scale = out_scale_ptr + to.to(tl.int64) * scale_expert_stride + at
                tl.store(out_scale + groups * group_stride, scale, (groups < num_groups) & (to >= 0))


@launched
@triton.jit(do_not_specialize=["rank"])
def return_packets_kernel(
    y_ptr, home_ptr, weight_ptr, windows_ptr, op_ptr, rank, most, cap, num_slots, packet_words, expert_stride, width,
    TOP_K: tl.constexpr, HEADER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (ranks * most, blocks of columns): weight * row of a received token's experts here, summed in top-k order in fp32 and rounded
    to y's dtype, into a packet for the rank that sent it.
    """
    received = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    total = tl.zeros((BLOCK,), tl.float32)
    num_here = 0
    for k in tl.static_range(TOP_K):
        home = tl.load(home_ptr + received * TOP_K + k)
        num_here += (home >= 0).to(tl.int32)
        first = (home >> 16).to(tl.int64) * expert_stride + (home & 0xFFFF) * width
        row = tl.load(y_ptr + first + cols, mask & (home >= 0), other=0.0)
        total += row.to(tl.float32) * tl.load(weight_ptr + received * TOP_K + k)
    if num_here > 0:
        window = tl.load(windows_ptr + received // most)
        packet = _packet(window, received % most + rank * cap, tl.load(op_ptr), num_slots, packet_words, HEADER)
        tl.store(packet.to(tl.pointer_type(y_ptr.dtype.element_ty)) + cols, total.to(y_ptr.dtype.element_ty), mask)


@launched
@triton.jit(do_not_specialize=["rank", "num_local"])
def sum_packets_kernel(
    windows_ptr, op_ptr, topk_ptr, shared_ptr, out_ptr, rank, cap, num_slots, packet_words, num_local, width,
    TOP_K: tl.constexpr, KS: tl.constexpr, SIZE: tl.constexpr, HEADER: tl.constexpr, BLOCK: tl.constexpr, HAS_SHARED: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of columns): what the ranks of a token's experts have sent, in rank order, then the shared experts' row."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    ks = tl.arange(0, KS)
    ranks = tl.load(topk_ptr + token * TOP_K + ks, ks < TOP_K, other=-1) // num_local
    window, op = tl.load(windows_ptr + rank), tl.load(op_ptr) - 1
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(SIZE):
        sent = tl.sum(((ranks == peer) & (ks < TOP_K)).to(tl.int32), 0) > 0
        packet = _packet(window, peer * cap + token, op, num_slots, packet_words, HEADER)
        total += tl.load(packet.to(tl.pointer_type(out_ptr.dtype.element_ty)) + cols, mask & sent, other=0.0).to(tl.float32)
    if HAS_SHARED:
        total += tl.load(shared_ptr + token * width + cols, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + cols, total.to(out_ptr.dtype.element_ty), mask)
