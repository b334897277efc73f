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
    scores = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    return tl.where(scores == 0.0, 0.0, scores)


@triton.jit
def _key(scores):
    """Integers in the order of the floats."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def border_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, border_ptr, row_stride, vocab_size, BLOCK: tl.constexpr):
    """Grid (rows,). The least score that min-p, then top-k, then top-p leave: every filter keeps all scores from a border upwards.

    The border of top-k is the largest score that at least k reach; of top-p the least that has less than top-p of the mass above it.
    Both are found by bisecting the 32 bits of a float, so ties at a border stay together and nothing is sorted.
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
        best = tl.maximum(best, _scores(row_ptr, start + offsets, vocab_size, temperature))
    top = tl.max(best, 0)
    top_key = _key(top).to(tl.int64)
    border = tl.full((), neg, tl.float32)
    if min_p > 0:
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            scores = _scores(row_ptr, start + offsets, vocab_size, temperature)
            least = tl.minimum(least, tl.where(tl.exp(scores - top) >= min_p, scores, float("inf")))
        border = tl.minimum(tl.min(least, 0), top)
    if (top_k > 0) & (top_k < vocab_size):
        low, high = _key(tl.full((), neg, tl.float32)).to(tl.int64), top_key
        for _ in range(32):
            middle = (low + high + 1) >> 1
            reach = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, vocab_size, BLOCK):
                keys = _key(_scores(row_ptr, start + offsets, vocab_size, temperature)).to(tl.int64)
                reach += ((keys >= middle) & (start + offsets < vocab_size)).to(tl.int32)
            enough = tl.sum(reach, 0) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        border = tl.maximum(border, _unkey(low))
    if top_p < 1.0:
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            scores = _scores(row_ptr, start + offsets, vocab_size, temperature)
            mass += tl.where(scores >= border, tl.exp(scores - top), 0.0)
        wanted = top_p * tl.sum(mass, 0)
        low, high = _key(border).to(tl.int64), top_key
        for _ in range(32):
            middle = (low + high) >> 1
            above = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocab_size, BLOCK):
                scores = _scores(row_ptr, start + offsets, vocab_size, temperature)
                above += tl.where(_key(scores).to(tl.int64) > middle, tl.exp(scores - top), 0.0)
            less = tl.sum(above, 0) < wanted
            high = tl.where(less & (low < high), middle, high)
            low = tl.where(less | (low >= high), low, middle + 1)
        border = tl.maximum(border, _unkey(high))
    tl.store(border_ptr + row, border)


@triton.jit
def _unkey(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _gumbel(quads, position, sequence, seed):
    """Gumbel noise in fp64, four tokens a quad: Philox4x32-10 of counter (quad, position, sequence, 0) and the two halves of the seed."""
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
    bits = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (4 * quads.shape[0],))
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return -tl.log(-tl.log(uniform))


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, seed_ptr, sequence_ptr, position_ptr, border_ptr, value_ptr, token_ptr, row_stride, vocab_size,
    SAMPLED: tl.constexpr, FILTERED: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of 4 * QUADS tokens). A block's best noisy score and the lowest token that has it, `[rows, blocks]` each."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    quads = block * QUADS + tl.arange(0, QUADS)
    tokens = block * 4 * QUADS + tl.arange(0, 4 * QUADS)
    row_ptr = logits_ptr + row * row_stride
    logits = tl.load(row_ptr + tokens, tokens < vocab_size, other=float("-inf"))
    values = logits.to(tl.float64)
    if SAMPLED:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            scores = _scores(row_ptr, tokens, vocab_size, temperature)
            if FILTERED:
                scores = tl.where(scores >= tl.load(border_ptr + row), scores, float("-inf"))
            noise = _gumbel(quads, tl.load(position_ptr + row), tl.load(sequence_ptr + row), tl.load(seed_ptr + row))
            values = scores.to(tl.float64) + noise
    values = tl.where(values == values, values, float("-inf"))  # a NaN is drawn last
    best = tl.max(values, 0)
    token = tl.min(tl.where((values == best) & (tokens < vocab_size), tokens, vocab_size - 1), 0)
    place = row * tl.num_programs(1) + block
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
