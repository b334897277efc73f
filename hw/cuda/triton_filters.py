"""Draws of rows with min-p, top-k or top-p, in Triton: every filter keeps all scores from a border upwards.

Few tokens can stand above a border. What is known of each part of the row, or a histogram of how far its logits lie below the best, bounds
where the border is; what is above that bound is gathered in a list, which the search for the border and the draw then read instead of the
row. Other rows leave each kernel at once.

    scan (triton_sampling)    best logit and sum of powers of each part       grid rows x blocks
    histogram_kernel          logits by distance from the best, where needed  grid rows x blocks
    cut_kernel                the bound                                       grid rows
    gather_kernel             the list                                        grid rows x blocks
    filtered_draw_kernel      border, then the draw                           grid rows
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
def _wants_histogram(top_k, min_p, num_parts, vocab_size):
    """Of a filtered row: whether its parts alone bound it too loosely. The best of half of the parts are as many tokens above a bound."""
    few = (top_k > 0) & (top_k < vocab_size) & (top_k <= num_parts // 2)
    return (min_p <= 0) & ~few


@triton.jit
def histogram_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr, counts_ptr, row_stride, vocab_size, num_parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of tokens). counts `[rows, blocks, BINS]` int32; peaks `[rows, num_parts]` as the scan left them."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k, min_p = tl.load(top_k_ptr + row), tl.load(min_p_ptr + row)
    filtered = is_filtered(temperature, top_k, tl.load(top_p_ptr + row), min_p, vocab_size)
    if filtered & _wants_histogram(top_k, min_p, num_parts, vocab_size):
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
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr, sums_ptr, counts_ptr, best_ptr, total_ptr, limit_ptr, vocab_size,
    num_parts, num_blocks, PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). Of each filtered row: best logit, sum of powers, last bin of its list.

    No list holds the last bin: the noise lies between -3.2 and 22.9, so a score 26.1 (37.7 powers of two) below the best is never drawn.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    if is_filtered(temperature, top_k, top_p, min_p, vocab_size):
        parts, bins = tl.arange(0, PARTS), tl.arange(0, BINS)
        part_ok = parts < num_parts
        peaks = tl.load(peaks_ptr + row * num_parts + parts, part_ok, other=float("-inf"))
        best, rate = tl.max(peaks, 0), LOG2_E / temperature
        total = tl.sum(_powers(peaks, best, rate) * tl.load(sums_ptr + row * num_parts + parts, part_ok, other=0.0), 0)
        # At least so many tokens are in each bin: all of them, or the best of each part.
        in_bin = tl.histogram(_bins(peaks, best, rate), BINS, part_ok)
        if _wants_histogram(top_k, min_p, num_parts, vocab_size):
            blocks = tl.arange(0, BLOCKS)
            places = counts_ptr + (row * num_blocks + blocks[:, None]) * BINS + bins[None, :]
            in_bin = tl.sum(tl.load(places, (blocks < num_blocks)[:, None], other=0), 0)
        limit = tl.full((), BINS - 2, tl.int32)
        if min_p > 0:
            limit = tl.minimum(limit, _bin_of(-tl.log2(tl.minimum(min_p, 1.0))))
        if (top_k > 0) & (top_k < vocab_size):
            limit = tl.minimum(limit, tl.sum((tl.cumsum(in_bin, 0) < top_k).to(tl.int32), 0))
        elif min_p <= 0:
            # What lies below bin b weighs no more than this; the border is above, once that is less than top-p leaves out.
            most = in_bin.to(tl.float32) * tl.exp2(bins.to(tl.float32) * (-1.0 / _BINS_EACH))
            below = tl.cumsum(most, 0, reverse=True) - most
            limit = tl.minimum(limit, tl.sum((below * 1.01 > (1.0 - top_p) * total).to(tl.int32), 0))
        tl.store(best_ptr + row, best)
        tl.store(total_ptr + row, total)
        # One bin more, for logits that the temperature makes equal to the border.
        tl.store(limit_ptr + row, tl.minimum(limit + 1, BINS - 2))


@triton.jit
def gather_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr, best_ptr, limit_ptr, sizes_ptr, values_ptr, tokens_ptr,
    row_stride, vocab_size, num_parts, REGION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of PARTS parts). values and tokens `[rows, blocks, REGION]`: the logits of each block's part of the list and whose
    they are; sizes `[rows, blocks]`: how many, though those beyond REGION are left out.

    Parts whose best is beyond the row's limit are not read.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if is_filtered(temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row), vocab_size):
        best, limit, rate = tl.load(best_ptr + row), tl.load(limit_ptr + row), LOG2_E / temperature
        place = row * tl.num_programs(1) + block
        size = tl.full((), 0, tl.int32)
        for part in range(block * PARTS, tl.minimum(block * PARTS + PARTS, num_parts)):
            if _bins(tl.load(peaks_ptr + row * num_parts + part), best, rate) <= limit:
                tokens = part * PART + tl.arange(0, PART)
                logits = tl.load(logits_ptr + row * row_stride + tokens, tokens < vocab_size, other=float("-inf"))
                logits = tl.where(logits == logits, logits, float("-inf"))
                listed = (tokens < vocab_size) & (_bins(logits, best, rate) <= limit)
                slots = size + tl.cumsum(listed.to(tl.int32), 0) - 1
                listed_here = listed & (slots < REGION)
                tl.store(values_ptr + place * REGION + slots, logits, listed_here)
                tl.store(tokens_ptr + place * REGION + slots, tokens, listed_here)
                size += tl.sum(listed.to(tl.int32), 0)
        tl.store(sizes_ptr + place, size)


@triton.jit
def _some(source, places, ends):
    """Logits at `places`; those at or beyond their ends, and NaN, are -inf, which no threshold reaches."""
    logits = tl.load(source + places, places < ends, other=float("-inf"))
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
def _reached_by(source, places, ends, stride, rounds, top_k, best):
    """The largest logit that at least top_k of the list reach; -inf if it has fewer."""
    low, high = key_of(tl.full((), float("-inf"), tl.float32)).to(tl.int64), key_of(best).to(tl.int64) + 1
    ways = tl.arange(0, _WAYS)
    # Invariant: top_k reach `low`, or it is -inf; fewer reach `high`.
    while high - low > 1:
        step = (high - low + _WAYS - 1) // _WAYS
        steps = low + step * ways
        reached = tl.zeros((places.shape[0], _WAYS), tl.int32)
        for i in tl.range(0, rounds, loop_unroll_factor=4):
            keys = key_of(_some(source, places + i * stride, ends))
            reached += (keys[:, None] >= steps.to(tl.int32)[None, :]).to(tl.int32)
        up = tl.sum(((tl.sum(reached, 0) >= top_k) & (steps < high) & (ways > 0)).to(tl.int64), 0)
        low, high = low + step * up, tl.minimum(low + step * (up + 1), high)
    return float_of(low)


@triton.jit
def _below_mass(source, places, ends, stride, rounds, wanted, best, rate):
    """The least logit above which lies less than the wanted mass, of `exp2((logit - best) * rate)`."""
    low, high = key_of(tl.full((), float("-inf"), tl.float32)).to(tl.int64) - 1, key_of(best).to(tl.int64)
    ways = tl.arange(0, _WAYS)
    # Invariant: above `high` lies less than the wanted mass, above `low` not less, or it is below -inf.
    while high - low > 1:
        step = (high - low + _WAYS - 1) // _WAYS
        steps = low + step * ways
        above = tl.zeros((places.shape[0], _WAYS), tl.float32)
        for i in tl.range(0, rounds, loop_unroll_factor=4):
            logits = _some(source, places + i * stride, ends)
            mass = _powers(logits, best, rate)
            above += tl.where(key_of(logits)[:, None] > steps.to(tl.int32)[None, :], mass[:, None], 0.0)
        up = tl.sum(((tl.sum(above, 0) >= wanted) & (steps < high) & (ways > 0)).to(tl.int64), 0)
        low, high = low + step * up, tl.minimum(low + step * (up + 1), high)
    return float_of(high)


@triton.jit
def _border(source, places, ends, stride, rounds, temperature, top_k, top_p, min_p, best, total, vocab_size):
    """The least score that min-p, then top-k, then top-p leave.

    That of top-k is the largest that at least k reach; of top-p the least that has less than top-p of the mass above it.
    """
    border = tl.full((), float("-inf"), tl.float32)
    if min_p > 0:
        border = _least_within(over(best, temperature), min_p)
    if (top_k > 0) & (top_k < vocab_size):
        border = tl.maximum(border, over(_reached_by(source, places, ends, stride, rounds, top_k, best), temperature))
    if top_p < 1.0:
        rate = LOG2_E / temperature
        if border > float("-inf"):
            kept = tl.zeros((places.shape[0],), tl.float32)
            for i in range(rounds):
                logits = _some(source, places + i * stride, ends)
                kept += tl.where(over(logits, temperature) >= border, _powers(logits, best, rate), 0.0)
            total = tl.sum(kept, 0)
        # What an earlier filter dropped lies below every threshold that could be the answer.
        crossing = _below_mass(source, places, ends, stride, rounds, top_p * total, best, rate)
        border = tl.maximum(border, over(crossing, temperature))
    return border


@triton.jit
def filtered_draw_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sequence_ptr, position_ptr, best_ptr, total_ptr, sizes_ptr,
    values_ptr, tokens_ptr, out_ptr, row_stride, vocab_size, num_blocks, REGION: tl.constexpr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). out `[rows]` int64, of filtered rows. A list that left something out is the whole row instead.

    Either is read in rounds: SLOTS of every block's part of the list at a time, or BLOCKS * SLOTS consecutive tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    if is_filtered(temperature, top_k, top_p, min_p, vocab_size):
        lanes = tl.arange(0, BLOCKS * SLOTS)
        block = lanes // SLOTS
        sizes = tl.load(sizes_ptr + row * num_blocks + block, block < num_blocks, other=0)
        most = tl.max(sizes, 0)
        listed = most <= REGION
        source = logits_ptr + row * row_stride
        if listed:
            source = values_ptr + row * num_blocks * REGION
        places, ends, stride = lanes, tl.zeros_like(lanes) + vocab_size, BLOCKS * SLOTS
        if listed:
            places, ends, stride = block * REGION + lanes % SLOTS, block * REGION + sizes, SLOTS
        rounds = tl.where(listed, tl.cdiv(most, SLOTS), tl.cdiv(vocab_size, BLOCKS * SLOTS))
        best = tl.load(best_ptr + row)
        border = _border(
            source, places, ends, stride, rounds, temperature, top_k, top_p, min_p, best, tl.load(total_ptr + row), vocab_size
        )  # fmt: skip

        position, sequence, seed = tl.load(position_ptr + row), tl.load(sequence_ptr + row), tl.load(seed_ptr + row)
        drawn, token = tl.full((), float("-inf"), tl.float64), vocab_size
        peak = tl.full((), float("-inf"), tl.float32)
        for i in range(rounds):
            here = places + i * stride
            real = here < ends
            tokens = here
            if listed:
                tokens = tl.load(tokens_ptr + row * num_blocks * REGION + here, real, other=0)
            scores = over(_some(source, here, ends), temperature)
            c0, c1, c2, c3 = philox(tokens // 4, position, sequence, seed)
            lane = tokens % 4
            bits = tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))
            kept = real & (scores >= border)
            rough = tl.max(tl.where(kept, scores + rough_gumbel(bits), float("-inf")), 0)
            if rough >= peak - slack_of(peak):
                peak = tl.maximum(peak, rough)
                noisy = tl.where(kept, scores.to(tl.float64) + gumbel(bits), float("-inf"))
                best_here = tl.max(noisy, 0)
                first = tl.min(tl.where(kept & (noisy == best_here), tokens, vocab_size), 0)
                # Of equal draws the lowest token; they need not come in order.
                token = tl.where(best_here > drawn, first, tl.where(best_here == drawn, tl.minimum(first, token), token))
                drawn = tl.maximum(drawn, best_here)
        tl.store(out_ptr + row, tl.where(token < vocab_size, token, 0).to(tl.int64))
