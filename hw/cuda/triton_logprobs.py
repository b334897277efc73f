"""Log-probabilities of drawn tokens and of the best ones, in Triton: one pass over the logits, then a look at the parts that matter."""

import triton
import triton.language as tl

from hw.cuda.triton_sampling import PART, float_of, key_of

_NONE: tl.constexpr = tl.constexpr(-(1 << 63))


@triton.jit
def _ranked(logits, tokens):
    """int64 that orders by logit, then by the lower token."""
    return (key_of(logits).to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def summarize_kernel(
    logits_ptr, tokens_ptr, peaks_ptr, sums_ptr, above_ptr, row_stride, vocab_size, num_parts, PARTS: tl.constexpr
):  # fmt: skip
    """Grid (rows, blocks of PARTS parts). Of each part of PART tokens, `[rows, num_parts]`: best logit, sum of `exp(logit - best)`, and how
    many logits are above that of the row's token."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    tokens = parts[:, None] * PART + tl.arange(0, PART)[None, :]
    row_ptr = logits_ptr + row * row_stride
    logits = tl.load(row_ptr + tokens, tokens < vocab_size, other=float("-inf"))
    peaks = tl.max(logits, 1)
    finite = tl.where(peaks == float("-inf"), 0.0, peaks)
    place, ok = row * num_parts + parts, parts < num_parts
    tl.store(peaks_ptr + place, peaks, ok)
    tl.store(sums_ptr + place, tl.sum(tl.exp(logits - finite[:, None]), 1), ok)
    tl.store(above_ptr + place, tl.sum((logits > tl.load(row_ptr + tl.load(tokens_ptr + row))).to(tl.int32), 1), ok)


@triton.jit(do_not_specialize=["num_top"])
def logprobs_kernel(
    logits_ptr, tokens_ptr, peaks_ptr, sums_ptr, above_ptr, token_out_ptr, rank_ptr, top_ids_ptr, top_out_ptr, row_stride, vocab_size,
    num_parts, num_top, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). Fields of `hw.api.Logprobs` from what `summarize_kernel` left. Of equal logits the lower token comes first."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    parts = tl.arange(0, PARTS)
    ok = parts < num_parts
    peaks = tl.load(peaks_ptr + row * num_parts + parts, ok, other=float("-inf"))
    best = tl.max(peaks, 0)
    sums = tl.load(sums_ptr + row * num_parts + parts, ok, other=0.0)
    log_total = tl.log(tl.sum(tl.where(sums > 0, tl.exp(peaks - best) * sums, 0.0), 0))
    logit = tl.load(row_ptr + tl.load(tokens_ptr + row))
    tl.store(token_out_ptr + row, logit - best - log_total)
    rank = tl.sum(tl.load(above_ptr + row * num_parts + parts, ok, other=0), 0) + 1
    tl.store(rank_ptr + row, rank.to(tl.int64))
    # The best left of each part, ranked by its part: which token it is shows once the part is read again.
    left = tl.where(ok, _ranked(peaks, parts), _NONE)
    last = tl.full((), (1 << 63) - 1, tl.int64)
    for i in range(num_top):
        part = (0x7FFFFFFF - (tl.max(left, 0) & 0xFFFFFFFF)).to(tl.int32)
        tokens = part * PART + tl.arange(0, PART)
        logits = tl.load(row_ptr + tokens, tokens < vocab_size, other=float("-inf"))
        ranked = tl.where(tokens < vocab_size, _ranked(logits, tokens), _NONE)
        last = tl.max(tl.where(ranked < last, ranked, _NONE), 0)
        tl.store(top_ids_ptr + row * num_top + i, 0x7FFFFFFF - (last & 0xFFFFFFFF))
        tl.store(top_out_ptr + row * num_top + i, float_of(last >> 32) - best - log_total)
        following = tl.max(tl.where(ranked < last, ranked, _NONE), 0)
        in_part = tl.where(following == _NONE, _NONE, _ranked(float_of(following >> 32), part))
        left = tl.where(parts == part, in_part, left)
