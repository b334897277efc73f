"""Triton kernels between logits and tokens. The noise is that of `hw.api.SampleInputs`: a pure function of a row's keys and the token."""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


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
def key_of(scores):
    """Integers in the order of the floats."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def over(logits, temperature):
    """Scores, rounded as in IEEE division, with one zero instead of two."""
    scores = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    return tl.where(scores == 0.0, 0.0, scores)


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p, vocab_size):
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0))


@triton.jit
def philox(quads, position, sequence, seed):
    """Philox4x32-10 of counter (quad, position, sequence, 0) and the two halves of the seed: 32 bits for each of a quad's four tokens."""
    c0 = quads.to(tl.uint32)
    c1 = tl.zeros_like(c0) + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros_like(c0) + (sequence & 0xFFFFFFFF).to(tl.uint32)
    c3 = tl.zeros_like(c0)
    k0 = tl.zeros_like(c0) + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = tl.zeros_like(c0) + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    factor_0 = tl.full(c0.shape, 0xD2511F53, tl.uint64)
    factor_2 = tl.full(c0.shape, 0xCD9E8D57, tl.uint64)
    for _ in tl.static_range(10):
        # A 64-bit product is one instruction, its halves in 32 bits are two.
        wide_0, wide_2 = c0.to(tl.uint64) * factor_0, c2.to(tl.uint64) * factor_2
        c0, c2 = (wide_2 >> 32).to(tl.uint32) ^ c1 ^ k0, (wide_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = wide_2.to(tl.uint32), wide_0.to(tl.uint32)
        k0 += tl.full(c0.shape, 0x9E3779B9, tl.uint32)
        k1 += tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _quad_bits(quads, position, sequence, seed):
    """The bits of consecutive tokens, four for each quad."""
    c0, c1, c2, c3 = philox(quads, position, sequence, seed)
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (4 * quads.shape[0],))


@triton.jit
def gumbel(bits):
    """The noise itself, in fp64: `-log(-log u)` with u the middle of the bits' interval of 2^-32."""
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


# A rough value is off by far less than 1e-3 plus a millionth of itself; a part whose best is further below the row's cannot hold the draw.
ROUGH: tl.constexpr = tl.constexpr(1e-3)
ROUGH_PART: tl.constexpr = tl.constexpr(1e-6)
PART: tl.constexpr = tl.constexpr(256)  # tokens


@triton.jit
def slack_of(peak):
    return tl.where(tl.abs(peak) < float("inf"), ROUGH + ROUGH_PART * tl.abs(peak), 0.0)


@triton.jit
def rough_gumbel(bits):
    """The noise in fp32. -log u is taken from 1 - u where u is near 1, where fp32 would lose it."""
    rest = (bits ^ tl.full(bits.shape, 0xFFFFFFFF, tl.uint32)).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 1 - u
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))  # -log(1 - rest), to 1e-6 of it below 1/32
    uniform = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return -libdevice.fast_logf(tl.where(rest < 0.03125, series, -libdevice.fast_logf(uniform)))


@triton.jit
def scan_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sequence_ptr, position_ptr, peaks_ptr, sums_ptr, row_stride,
    vocab_size, num_parts, SAMPLED: tl.constexpr, FILTERED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of PARTS parts). What a row needs of each part of PART tokens, `[rows, num_parts]` fp32.

    peaks: the best logit; of a row that draws without filters, the best noisy score, roughly. sums: of a row with filters,
    `exp2((logit - peak) log2(e) / temperature)`. A NaN counts as -inf.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * PARTS * PART + tl.arange(0, PARTS * PART)
    values = tl.load(logits_ptr + row * row_stride + tokens, tokens < vocab_size, other=float("-inf"))
    values = tl.where(values == values, values, float("-inf"))
    parts = block * PARTS + tl.arange(0, PARTS)
    place, ok = row * num_parts + parts, parts < num_parts
    if SAMPLED:
        temperature = tl.load(temperature_ptr + row)
        noisy = temperature > 0
        if FILTERED:
            top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
            filtered = is_filtered(temperature, top_k, top_p, min_p, vocab_size)
            noisy = noisy & ~filtered
            if filtered:
                by_part = tl.reshape(values, (PARTS, PART))
                best = tl.max(by_part, 1)[:, None]
                powers = tl.exp2(tl.where(by_part == best, 0.0, (by_part - best) * (1.4426950408889634 / temperature)))
                tl.store(sums_ptr + place, tl.sum(powers, 1), ok)
        if noisy:
            quads = block * (PARTS * PART // 4) + tl.arange(0, PARTS * PART // 4)
            bits = _quad_bits(quads, tl.load(position_ptr + row), tl.load(sequence_ptr + row), tl.load(seed_ptr + row))
            values = values * (1.0 / temperature) + rough_gumbel(bits)
    tl.store(peaks_ptr + place, tl.max(tl.reshape(values, (PARTS, PART)), 1), ok)


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sequence_ptr, position_ptr, peaks_ptr, out_ptr, row_stride,
    vocab_size, num_parts, SAMPLED: tl.constexpr, FILTERED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). out `[rows]` int64 of rows without filters: the lowest token with the best logit, or with the best noisy score in fp64.

    Only parts that the rough scan does not rule out are looked at.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if FILTERED:  # noqa: SIM102  (this one is the compiler's)
        if is_filtered(temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row), vocab_size):
            return
    noisy = SAMPLED & (temperature > 0)
    parts = tl.arange(0, PARTS)
    peaks = tl.load(peaks_ptr + row * num_parts + parts, parts < num_parts, other=float("-inf"))
    peak = tl.max(peaks, 0)
    slack = tl.where(noisy, slack_of(peak), 0.0)
    left = (parts < num_parts) & (peaks >= peak - slack)
    drawn, token = tl.full((), float("-inf"), tl.float64), tl.full((), 0, tl.int32)
    part = tl.min(tl.where(left, parts, PARTS), 0)
    while part < PARTS:
        tokens = part * PART + tl.arange(0, PART)
        logits = tl.load(logits_ptr + row * row_stride + tokens, tokens < vocab_size, other=float("-inf"))
        logits = tl.where(logits == logits, logits, float("-inf"))
        values = logits.to(tl.float64)
        if noisy:
            quads = part * (PART // 4) + tl.arange(0, PART // 4)
            bits = _quad_bits(quads, tl.load(position_ptr + row), tl.load(sequence_ptr + row), tl.load(seed_ptr + row))
            values = over(logits, temperature).to(tl.float64) + gumbel(bits)
        best = tl.max(values, 0)
        first = tl.min(tl.where((values == best) & (tokens < vocab_size), tokens, vocab_size - 1), 0)
        better = best > drawn
        drawn, token = tl.where(better, best, drawn), tl.where(better, first, token)
        # Without noise the first part with the best logit has the token.
        part = tl.where(noisy, tl.min(tl.where(left & (parts > part), parts, PARTS), 0), PARTS)
    tl.store(out_ptr + row, token.to(tl.int64))
