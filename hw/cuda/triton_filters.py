"""Draws of rows with min-p, top-k or top-p, in Triton: every filter keeps all scores from a border upwards.

Few tokens can stand above a border, so a histogram of how far logits lie below the row's best bounds where it is, and what is above
that bound is gathered in a list, which the search for the border and the draw then read instead of the row. Other rows leave each kernel
at once.

    scan (triton_sampling)    best logit, sum of powers         grid rows x blocks
    histogram_kernel          logits by distance from the best  grid rows x blocks
    cut_kernel                the bound, the size of the list   grid rows
    gather_kernel             the list, in the row's order      grid rows x blocks
    filtered_draw_kernel      border, then the draw             grid rows
"""

import triton
import triton.language as tl

from hw.cuda.triton_sampling import PART, float_of, gumbel, is_filtered, key_of, over, philox, rough_gumbel, slack_of

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Bins of a distance in powers of two of probability; the last one holds what is at least 39.4 away.
BINS: tl.constexpr = tl.constexpr(64)
_BINS_EACH: tl.constexpr = tl.constexpr(1.6)
_WAYS: tl.constexpr = tl.constexpr(16)


@triton.jit
def _bin_of(distance):
    return tl.minimum(distance * _BINS_EACH, BINS - 1.0).to(tl.int32)


@triton.jit
def _bins(logits, best, rate):
    # The best itself is at 0, even if it is infinite; -inf lands in the last bin.
    return _bin_of(tl.where(logits == best, 0.0, (best - logits) * rate))


@triton.jit
def histogram_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr, counts_ptr, row_stride, vocab_size, num_parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of tokens). counts `[rows, blocks, BINS]` int32; peaks `[rows, num_parts]` as the scan left them."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if is_filtered(temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row), vocab_size):
        parts = tl.arange(0, PARTS)
        best = tl.max(tl.load(peaks_ptr + row * num_parts + parts, parts < num_parts, other=float("-inf")), 0)
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * row_stride + tokens, tokens < vocab_size, other=float("-inf"))
        logits = tl.where(logits == logits, logits, float("-inf"))
        counts = tl.histogram(_bins(logits, best, LOG2_E / temperature), BINS, tokens < vocab_size)
        tl.store(counts_ptr + (row * tl.num_programs(1) + block) * BINS + tl.arange(0, BINS), counts)


@triton.jit
def _powers(logits, best, rate):
    return tl.exp2(tl.where(logits == best, 0.0, (logits - best) * rate))


@triton.jit
def cut_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr, sums_ptr, counts_ptr, best_ptr, total_ptr, limit_ptr, size_ptr, first_ptr,
    vocab_size, num_parts, num_blocks, capacity, PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). Of each filtered row: best logit, sum of powers, last bin of its list, size of the list (-1: more than `capacity`),
    and where each block's part of it begins, `[rows, blocks]`.

    No list holds the last bin: the noise lies between -3.2 and 22.9, so a score 26.1 (37.7 powers of two) below the best is never drawn.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    if is_filtered(temperature, top_k, top_p, min_p, vocab_size):
        parts = tl.arange(0, PARTS)
        part_ok = parts < num_parts
        peaks = tl.load(peaks_ptr + row * num_parts + parts, part_ok, other=float("-inf"))
        best = tl.max(peaks, 0)
        total = tl.sum(_powers(peaks, best, LOG2_E / temperature) * tl.load(sums_ptr + row * num_parts + parts, part_ok, other=0.0), 0)
        blocks, bins = tl.arange(0, BLOCKS), tl.arange(0, BINS)
        places = counts_ptr + (row * num_blocks + blocks[:, None]) * BINS + bins[None, :]
        counts = tl.load(places, (blocks < num_blocks)[:, None], other=0)
        in_bin = tl.sum(counts, 0)
        limit = tl.full((), BINS - 2, tl.int32)
        restricted = min_p > 0
        if min_p > 0:
            limit = tl.minimum(limit, _bin_of(-tl.log2(tl.minimum(min_p, 1.0))))
        if (top_k > 0) & (top_k < vocab_size):
            limit = tl.minimum(limit, tl.sum((tl.cumsum(in_bin, 0) < top_k).to(tl.int32), 0))
        elif not restricted:
            # What lies below bin b weighs no more than this; the border is above, once that is less than top-p leaves out.
            most = in_bin.to(tl.float32) * tl.exp2(bins.to(tl.float32) * (-1.0 / _BINS_EACH))
            below = tl.cumsum(most, 0, reverse=True) - most
            limit = tl.minimum(limit, tl.sum((below * 1.01 > (1.0 - top_p) * total).to(tl.int32), 0))
        # One bin more, for logits that the temperature makes equal to the border.
        limit = tl.minimum(limit + 1, BINS - 2)
        in_block = tl.sum(tl.where((bins <= limit)[None, :], counts, 0), 1)
        size = tl.sum(in_block, 0)
        tl.store(best_ptr + row, best)
        tl.store(total_ptr + row, total)
        tl.store(limit_ptr + row, limit)
        tl.store(size_ptr + row, tl.where(size <= capacity, size, -1))
        tl.store(first_ptr + row * num_blocks + blocks, tl.cumsum(in_block, 0) - in_block, blocks < num_blocks)


@triton.jit
def gather_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr, best_ptr, limit_ptr, size_ptr, first_ptr, values_ptr,
    tokens_ptr, row_stride, vocab_size, num_parts, capacity, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of PARTS parts). values and tokens `[rows, capacity]`: the logits of the row's list and whose they are.

    Parts whose best is beyond the row's limit are not read.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    filtered = is_filtered(temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row), vocab_size)
    if filtered & (tl.load(size_ptr + row) >= 0):
        best, limit, rate = tl.load(best_ptr + row), tl.load(limit_ptr + row), LOG2_E / temperature
        parts = block * PARTS + tl.arange(0, PARTS)
        peaks = tl.load(peaks_ptr + row * num_parts + parts, parts < num_parts, other=float("-inf"))
        wanted = (_bins(peaks, best, rate) <= limit)[:, None]
        tokens = parts[:, None] * PART + tl.arange(0, PART)[None, :]
        logits = tl.load(logits_ptr + row * row_stride + tokens, wanted & (tokens < vocab_size), other=float("-inf"))
        logits = tl.where(logits == logits, logits, float("-inf"))
        listed = wanted & (tokens < vocab_size) & (_bins(logits, best, rate) <= limit)
        tokens, logits = tl.reshape(tokens, (PARTS * PART,)), tl.reshape(logits, (PARTS * PART,))
        listed = tl.reshape(listed, (PARTS * PART,))
        first = tl.load(first_ptr + row * tl.num_programs(1) + block)
        places = row * capacity + first + tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(values_ptr + places, logits, listed)
        tl.store(tokens_ptr + places, tokens, listed)


@triton.jit
def _part(values_ptr, start, size, BLOCK: tl.constexpr):
    """Part of a list; what is not there, and NaN, is -inf, which no threshold reaches."""
    places = start + tl.arange(0, BLOCK)
    logits = tl.load(values_ptr + places, places < size, other=float("-inf"))
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def _least_within(best, min_p):
    """The least score whose power of e is at least min_p times that of the best score: found among all floats, by halving."""
    low, high = key_of(tl.full((), float("-inf"), tl.float32)).to(tl.int64), key_of(best).to(tl.int64)
    # Invariant: `high` is within, `low` is not.
    for _ in range(32):
        middle = (low + high) >> 1
        within = tl.exp(float_of(middle) - best) >= min_p
        low, high = tl.where(within, low, middle), tl.where(within, middle, high)
    return float_of(high)


@triton.jit
def _reached_by(values_ptr, size, top_k, best, BLOCK: tl.constexpr):
    """The largest logit that at least top_k of the list reach; -inf if it has fewer."""
    low, high = key_of(tl.full((), float("-inf"), tl.float32)).to(tl.int64), key_of(best).to(tl.int64) + 1
    ways = tl.arange(0, _WAYS)
    # Invariant: top_k reach `low`, or it is -inf; fewer reach `high`.
    while high - low > 1:
        step = (high - low + _WAYS - 1) // _WAYS
        steps = low + step * ways
        reached = tl.zeros((BLOCK, _WAYS), tl.int32)
        for start in range(0, size, BLOCK):
            keys = key_of(_part(values_ptr, start, size, BLOCK))
            reached += (keys[:, None] >= steps.to(tl.int32)[None, :]).to(tl.int32)
        up = tl.sum(((tl.sum(reached, 0) >= top_k) & (steps < high) & (ways > 0)).to(tl.int64), 0)
        low, high = low + step * up, tl.minimum(low + step * (up + 1), high)
    return float_of(low)


@triton.jit
def _below_mass(values_ptr, size, wanted, best, rate, BLOCK: tl.constexpr):
    """The least logit above which lies less than the wanted mass, of `exp2((logit - best) * rate)`."""
    low, high = key_of(tl.full((), float("-inf"), tl.float32)).to(tl.int64) - 1, key_of(best).to(tl.int64)
    ways = tl.arange(0, _WAYS)
    # Invariant: above `high` lies less than the wanted mass, above `low` not less, or it is below -inf.
    while high - low > 1:
        step = (high - low + _WAYS - 1) // _WAYS
        steps = low + step * ways
        above = tl.zeros((BLOCK, _WAYS), tl.float32)
        for start in range(0, size, BLOCK):
            logits = _part(values_ptr, start, size, BLOCK)
            mass = _powers(logits, best, rate)
            above += tl.where(key_of(logits)[:, None] > steps.to(tl.int32)[None, :], mass[:, None], 0.0)
        up = tl.sum(((tl.sum(above, 0) >= wanted) & (steps < high) & (ways > 0)).to(tl.int64), 0)
        low, high = low + step * up, tl.minimum(low + step * (up + 1), high)
    return float_of(high)


@triton.jit
def _border(values_ptr, size, temperature, top_k, top_p, min_p, best, total, vocab_size, BLOCK: tl.constexpr):
    """The least score that min-p, then top-k, then top-p leave.

    That of top-k is the largest that at least k reach; of top-p the least that has less than top-p of the mass above it.
    """
    border = tl.full((), float("-inf"), tl.float32)
    if min_p > 0:
        border = _least_within(over(best, temperature), min_p)
    if (top_k > 0) & (top_k < vocab_size):
        border = tl.maximum(border, over(_reached_by(values_ptr, size, top_k, best, BLOCK), temperature))
    if top_p < 1.0:
        rate = LOG2_E / temperature
        if border > float("-inf"):
            kept = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, size, BLOCK):
                logits = _part(values_ptr, start, size, BLOCK)
                kept += tl.where(over(logits, temperature) >= border, _powers(logits, best, rate), 0.0)
            total = tl.sum(kept, 0)
        # What an earlier filter dropped lies below every threshold that could be the answer.
        border = tl.maximum(border, over(_below_mass(values_ptr, size, top_p * total, best, rate, BLOCK), temperature))
    return border


@triton.jit
def filtered_draw_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sequence_ptr, position_ptr, best_ptr, total_ptr, size_ptr,
    values_ptr, tokens_ptr, out_ptr, row_stride, vocab_size, capacity, BLOCK: tl.constexpr, DRAW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). out `[rows]` int64, of filtered rows. A list that did not fit is the whole row instead."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    if is_filtered(temperature, top_k, top_p, min_p, vocab_size):
        size = tl.load(size_ptr + row)
        listed = size >= 0
        source = logits_ptr + row * row_stride
        if listed:
            source = values_ptr + row * capacity
        size = tl.where(listed, size, vocab_size)
        best = tl.load(best_ptr + row)
        border = _border(source, size, temperature, top_k, top_p, min_p, best, tl.load(total_ptr + row), vocab_size, BLOCK)

        position, sequence, seed = tl.load(position_ptr + row), tl.load(sequence_ptr + row), tl.load(seed_ptr + row)
        offsets = tl.arange(0, DRAW_BLOCK)
        drawn, token = tl.full((), float("-inf"), tl.float64), tl.full((), 0, tl.int32)
        peak = tl.full((), float("-inf"), tl.float32)
        for start in range(0, size, DRAW_BLOCK):
            real = start + offsets < size
            tokens = start + offsets
            if listed:
                tokens = tl.load(tokens_ptr + row * capacity + start + offsets, real, other=0)
            scores = over(_part(source, start, size, DRAW_BLOCK), temperature)
            c0, c1, c2, c3 = philox(tokens // 4, position, sequence, seed)
            lane = tokens % 4
            bits = tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))
            kept = real & (scores >= border)
            rough = tl.max(tl.where(kept, scores + rough_gumbel(bits), float("-inf")), 0)
            if rough >= peak - slack_of(peak):
                peak = tl.maximum(peak, rough)
                noisy = tl.where(kept, scores.to(tl.float64) + gumbel(bits), float("-inf"))
                best_here = tl.max(noisy, 0)
                first = tl.min(tl.where(kept & (noisy == best_here), tokens, vocab_size - 1), 0)
                # Tokens rise along the list, so of equal draws the first is the lowest.
                better = best_here > drawn
                drawn, token = tl.where(better, best_here, drawn), tl.where(better, first, token)
        tl.store(out_ptr + row, token.to(tl.int64))
