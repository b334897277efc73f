"""Triton kernels between logits and tokens. The noise is that of `hw.api.SampleInputs`: a pure function of a row's keys and the token."""

import triton
import triton.language as tl


@triton.jit
def penalize_kernel(
    logits_ptr, rows_ptr, prompt_ptr, counts_ptr, presence_ptr, frequency_ptr, repetition_ptr, row_stride, vocab_size, BLOCK: tl.constexpr
):
    """Grid (penalized rows, blocks of tokens); prompt and counts `[P, V]` contiguous."""
    i = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    place = logits_ptr + tl.load(rows_ptr + i) * row_stride + tokens
    scores = tl.load(place, mask, other=0.0)
    counts = tl.load(counts_ptr + i * vocab_size + tokens, mask, other=0.0)
    prompt = tl.load(prompt_ptr + i * vocab_size + tokens, mask, other=0) != 0
    repetition = tl.load(repetition_ptr + i)
    repeated = tl.where(scores > 0, tl.div_rn(scores, tl.zeros_like(scores) + repetition), scores * repetition)
    scores = tl.where(prompt | (counts > 0), repeated, scores)
    scores -= tl.load(frequency_ptr + i) * counts
    scores -= tl.where(counts > 0, tl.load(presence_ptr + i), 0.0)
    tl.store(place, scores, mask)


@triton.jit
def _scores(row_ptr, tokens, vocab_size, temperature):
    """Logits over temperature, rounded as in IEEE division, -inf beyond the vocabulary, one zero instead of two."""
    logits = tl.load(row_ptr + tokens, tokens < vocab_size, other=float("-inf"))
    return _over(logits, tl.zeros_like(logits) + temperature)


@triton.jit
def _key(scores):
    """Integers in the order of the floats."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def border_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, border_ptr, row_stride, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows,). The least score that min-p, then top-k, then top-p leave: every filter keeps all scores from a border upwards.

    The border of top-k is the largest score that at least k reach; of top-p the least that has less than top-p of the mass above it.
    Both are found by quartering the range of a float's 32 bits, so ties at a border stay together and nothing is sorted. The search runs
    on logits, which division by the temperature keeps in order: logits that it makes equal share their border.
    """
    row = tl.program_id(0).to(tl.int64)
    neg = float("-inf")
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    tl.store(border_ptr + row, neg)
    if (temperature <= 0) | ((top_k <= 0) & (top_p >= 1.0) & (min_p <= 0)):
        return
    row_ptr = logits_ptr + row * row_stride
    offsets = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), neg, tl.float32)
    for start in range(0, vocab_size, BLOCK):
        best = tl.maximum(best, tl.load(row_ptr + start + offsets, start + offsets < vocab_size, other=neg))
    top_logit = tl.max(best, 0)
    top = _over(top_logit, temperature)
    least_key, top_key = _key(tl.full((), neg, tl.float32)).to(tl.int64), _key(top_logit).to(tl.int64)
    border = tl.full((), neg, tl.float32)
    if min_p > 0:
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            scores = _scores(row_ptr, start + offsets, vocab_size, temperature)
            least = tl.minimum(least, tl.where(tl.exp(scores - top) >= min_p, scores, float("inf")))
        border = tl.minimum(tl.min(least, 0), top)
    if (top_k > 0) & (top_k < vocab_size):
        reached = _reached_by(row_ptr, vocab_size, top_k, least_key, top_key, BLOCK)
        border = tl.maximum(border, _over(reached, temperature))
    if top_p < 1.0:
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            scores = _scores(row_ptr, start + offsets, vocab_size, temperature)
            mass += tl.where(scores >= border, tl.exp(scores - top), 0.0)
        # What an earlier filter dropped lies below every threshold that could be the answer.
        rate = 1.4426950408889634 / temperature
        crossing = _below_mass(row_ptr, vocab_size, top_p * tl.sum(mass, 0), top_logit, rate, least_key, top_key, BLOCK)
        border = tl.maximum(border, _over(crossing, temperature))
    tl.store(border_ptr + row, border)


@triton.jit
def _over(logit, temperature):
    """A score, rounded as in IEEE division, with one zero instead of two."""
    score = tl.div_rn(logit, temperature)
    return tl.where(score == 0.0, 0.0, score)


@triton.jit
def _quarters(low, high):
    """Three thresholds between two keys; equal ones and `high` itself once the range is short."""
    step = (high - low + 3) >> 2
    return tl.minimum(low + step, high), tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)


@triton.jit
def _reached_by(row_ptr, vocab_size, top_k, least_key, top_key, BLOCK: tl.constexpr):
    """The largest logit that at least top_k logits reach."""
    offsets = tl.arange(0, BLOCK)
    # Invariant: at least top_k logits reach `low`, fewer reach `high`.
    low, high = least_key, top_key + 1
    for _ in range(16):
        first, second, third = _quarters(low, high)
        at_1, at_2, at_3 = _unkey(first), _unkey(second), _unkey(third)
        reach_1, reach_2, reach_3 = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocab_size, BLOCK):
            # What is beyond the vocabulary reaches nothing, not even -inf.
            logits = tl.load(row_ptr + start + offsets, start + offsets < vocab_size, other=float("nan"))
            reach_1 += (logits >= at_1).to(tl.int32)
            reach_2 += (logits >= at_2).to(tl.int32)
            reach_3 += (logits >= at_3).to(tl.int32)
        # A threshold at `high` itself is known.
        enough_1 = (tl.sum(reach_1, 0) >= top_k) & (first < high)
        enough_2 = (tl.sum(reach_2, 0) >= top_k) & (second < high)
        enough_3 = (tl.sum(reach_3, 0) >= top_k) & (third < high)
        high = tl.where(enough_1, tl.where(enough_2, tl.where(enough_3, high, third), second), first)
        low = tl.where(enough_3, third, tl.where(enough_2, second, tl.where(enough_1, first, low)))
    return _unkey(low)


@triton.jit
def _below_mass(row_ptr, vocab_size, wanted, top_logit, rate, least_key, top_key, BLOCK: tl.constexpr):
    """The least logit above which lies less than the wanted mass, of `exp2((logit - top) * rate)`."""
    offsets = tl.arange(0, BLOCK)
    # Invariant: above `high` lies less than the wanted mass, above `low` not less.
    low, high = least_key - 1, top_key
    for _ in range(16):
        first, second, third = _quarters(low, high)
        at_1, at_2, at_3 = _unkey(first), _unkey(second), _unkey(third)
        above_1, above_2, above_3 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            logits = tl.load(row_ptr + start + offsets, start + offsets < vocab_size, other=float("-inf"))
            mass = tl.exp2((logits - top_logit) * rate)
            above_1 += tl.where(logits > at_1, mass, 0.0)
            above_2 += tl.where(logits > at_2, mass, 0.0)
            above_3 += tl.where(logits > at_3, mass, 0.0)
        less_1 = (tl.sum(above_1, 0) < wanted) | (first == high)
        less_2 = (tl.sum(above_2, 0) < wanted) | (second == high)
        less_3 = (tl.sum(above_3, 0) < wanted) | (third == high)
        low = tl.where(less_1, low, tl.where(less_2, first, tl.where(less_3, second, third)))
        high = tl.where(less_1, first, tl.where(less_2, second, tl.where(less_3, third, high)))
    return _unkey(high)


@triton.jit
def _unkey(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _random_bits(quads, position, sequence, seed):
    """Philox4x32-10 of counter (quad, position, sequence, 0) and the two halves of the seed: 32 bits a token, four tokens a quad."""
    c0 = quads.to(tl.uint32)
    c1 = tl.zeros_like(c0) + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros_like(c0) + (sequence & 0xFFFFFFFF).to(tl.uint32)
    c3 = tl.zeros_like(c0)
    k0 = tl.zeros_like(c0) + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = tl.zeros_like(c0) + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    b = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high_a, low_a = tl.umulhi(a, c0), a * c0
        high_b, low_b = tl.umulhi(b, c2), b * c2
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0 += tl.full(c0.shape, 0x9E3779B9, tl.uint32)
        k1 += tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (4 * quads.shape[0],))


@triton.jit
def _kept_scores(row_ptr, tokens, vocab_size, temperature, border_ptr, row, FILTERED: tl.constexpr):
    scores = _scores(row_ptr, tokens, vocab_size, temperature)
    if FILTERED:
        scores = tl.where(scores >= tl.load(border_ptr + row), scores, float("-inf"))
    return scores


# A rough value is off by far less than 1e-3 plus a millionth of itself; a block whose best is further below the row's cannot hold the draw.
ROUGH: tl.constexpr = tl.constexpr(1e-3)
ROUGH_PART: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def rough_draw_kernel(
    logits_ptr, temperature_ptr, seed_ptr, sequence_ptr, position_ptr, border_ptr, rough_ptr, row_stride, vocab_size,
    FILTERED: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of 4 * QUADS tokens). A block's best noisy score in fp32, `[rows, blocks]`; greedy rows have no noise.

    -log u is taken from 1 - u where u is near 1, where fp32 would lose it.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    quads = block * QUADS + tl.arange(0, QUADS)
    tokens = block * 4 * QUADS + tl.arange(0, 4 * QUADS)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row)
    values = tl.load(row_ptr + tokens, tokens < vocab_size, other=float("-inf"))
    if temperature > 0:
        bits = _random_bits(quads, tl.load(position_ptr + row), tl.load(sequence_ptr + row), tl.load(seed_ptr + row))
        rest = (bits ^ tl.full(bits.shape, 0xFFFFFFFF, tl.uint32)).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 1 - u
        series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))  # -log(1 - rest), to 1e-6 of it below 1/32
        uniform = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
        exponential = tl.where(rest < 0.03125, series, -tl.log(uniform))
        values = _kept_scores(row_ptr, tokens, vocab_size, temperature, border_ptr, row, FILTERED) - tl.log(exponential)
    values = tl.where(values == values, values, float("-inf"))  # a NaN is drawn last
    tl.store(rough_ptr + row * tl.num_programs(1) + block, tl.max(values, 0))


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, seed_ptr, sequence_ptr, position_ptr, border_ptr, rough_ptr, value_ptr, token_ptr, row_stride, vocab_size,
    SAMPLED: tl.constexpr, FILTERED: tl.constexpr, QUADS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of 4 * QUADS tokens). A block's best noisy score in fp64 and the lowest token that has it, `[rows, blocks]` each.

    Blocks that the rough draw rules out are left at -inf.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + block
    quads = block * QUADS + tl.arange(0, QUADS)
    tokens = block * 4 * QUADS + tl.arange(0, 4 * QUADS)
    row_ptr = logits_ptr + row * row_stride
    if SAMPLED:
        blocks = tl.arange(0, BLOCKS)
        rough = tl.load(rough_ptr + row * tl.num_programs(1) + blocks, blocks < tl.num_programs(1), other=float("-inf"))
        best_rough = tl.max(rough, 0)
        if tl.load(rough_ptr + place) < best_rough - ROUGH - ROUGH_PART * tl.abs(best_rough):
            tl.store(value_ptr + place, float("-inf"))
            tl.store(token_ptr + place, 0)
            return
    logits = tl.load(row_ptr + tokens, tokens < vocab_size, other=float("-inf"))
    values = logits.to(tl.float64)
    if SAMPLED:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            bits = _random_bits(quads, tl.load(position_ptr + row), tl.load(sequence_ptr + row), tl.load(seed_ptr + row))
            uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
            scores = _kept_scores(row_ptr, tokens, vocab_size, temperature, border_ptr, row, FILTERED)
            values = scores.to(tl.float64) - tl.log(-tl.log(uniform))
    values = tl.where(values == values, values, float("-inf"))  # a NaN is drawn last
    best = tl.max(values, 0)
    token = tl.min(tl.where((values == best) & (tokens < vocab_size), tokens, vocab_size - 1), 0)
    tl.store(value_ptr + place, best)
    tl.store(token_ptr + place, token)


@triton.jit
def best_block_kernel(value_ptr, token_ptr, out_ptr, num_blocks, BLOCK: tl.constexpr):
    """Grid (rows,). The first of the blocks with the best value gives the token: int64."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK)
    real = blocks < num_blocks
    values = tl.load(value_ptr + row * num_blocks + blocks, real, other=float("-inf"))
    first = tl.min(tl.where(real & (values == tl.max(values, 0)), blocks, BLOCK), 0)
    tl.store(out_ptr + row, tl.load(token_ptr + row * num_blocks + first).to(tl.int64))
