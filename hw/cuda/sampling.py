"""From logits to tokens, and their log-probabilities, in Triton."""

import torch

from hw.api import Logprobs, PenaltyInputs, SampleInputs
from hw.cuda.launch import cdiv, power_of_2
from hw.cuda.triton_filters import BINS, cut_kernel, filtered_draw_kernel, gather_kernel, histogram_kernel
from hw.cuda.triton_logprobs import logprobs_kernel, summarize_kernel
from hw.cuda.triton_sampling import PART, draw_kernel, penalize_kernel, scan_kernel

_BLOCK = 4096  # tokens a program
_REGION = 1024  # most tokens of such a block that a filtered row's list can hold
_LANES = 1024  # tokens of the list that are looked at together
_PART = PART.value


class SamplingOps:
    """See `hw.api.Ops`. Draws use the same noise as every backend, so equal logits give equal tokens.

    What a row needs is decided on the device, row by row; the host flags of `SampleInputs` leave out kernels that no row needs. With
    `any_filtered` and no filtered row the four kernels of the filters end at once.
    """

    def penalize(self, logits, inputs: PenaltyInputs):
        num_rows, vocab_size = inputs.output_counts.shape
        assert logits.stride(1) == 1 and inputs.prompt_mask.is_contiguous() and inputs.output_counts.is_contiguous()
        if not num_rows or not vocab_size:
            return
        block = min(_BLOCK, power_of_2(vocab_size))
        penalize_kernel[(num_rows, cdiv(vocab_size, block))](
            logits, inputs.rows, inputs.prompt_mask, inputs.output_counts, inputs.presence, inputs.frequency, inputs.repetition,
            logits.stride(0), vocab_size, BLOCK=block, num_warps=8,
        )  # fmt: skip

    def sample(self, logits, inputs: SampleInputs):
        num_rows, vocab_size = logits.shape
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
        tokens = torch.empty((num_rows,), dtype=torch.int64, device=logits.device)
        if not num_rows:
            return tokens
        sampled, filtered = inputs.any_sampled, inputs.any_sampled and inputs.any_filtered
        num_parts = cdiv(vocab_size, _PART)
        peaks = torch.empty((num_rows, num_parts), device=logits.device)
        sums = torch.empty_like(peaks) if filtered else None
        rules = (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p)
        keys = (inputs.seed, inputs.sequence_idx, inputs.position)
        sizes = (logits.stride(0), vocab_size, num_parts)
        parts = min(_BLOCK // _PART, power_of_2(num_parts))
        scan_kernel[(num_rows, cdiv(num_parts, parts))](
            logits, *rules, *keys, peaks, sums, *sizes, SAMPLED=sampled, FILTERED=filtered, PARTS=parts, num_warps=8
        )  # fmt: skip
        draw_kernel[(num_rows,)](
            logits, *rules, *keys, peaks, tokens, *sizes,
            SAMPLED=sampled, FILTERED=filtered, PARTS=power_of_2(num_parts), num_warps=4,
        )  # fmt: skip
        if filtered:
            _filtered_draws(logits, rules, keys, peaks, sums, tokens)
        return tokens

    def logprobs(self, logits, tokens, num_top):
        num_rows, vocab_size = logits.shape
        assert logits.dtype == torch.float32 and logits.stride(1) == 1 and num_top <= vocab_size, (logits.dtype, logits.stride(), num_top)
        new = lambda dtype, *shape: torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)  # noqa: E731
        found = Logprobs(new(torch.float32), new(torch.int64), new(torch.int64, num_top), new(torch.float32, num_top))
        if not num_rows:
            return found
        num_parts = cdiv(vocab_size, _PART)
        parts = min(_BLOCK // _PART, power_of_2(num_parts))
        summary = new(torch.float32, num_parts), new(torch.float32, num_parts), new(torch.int32, num_parts)
        sizes = (logits.stride(0), vocab_size, num_parts)
        summarize_kernel[(num_rows, cdiv(num_parts, parts))](logits, tokens, *summary, *sizes, PARTS=parts, num_warps=8)
        logprobs_kernel[(num_rows,)](
            logits, tokens, *summary, found.token, found.rank, found.top_ids, found.top, *sizes, num_top,
            PARTS=power_of_2(num_parts),
        )  # fmt: skip
        return found


def _filtered_draws(logits, rules, keys, peaks, sums, tokens) -> None:
    """The draws of all rows with filters. peaks and sums as `scan_kernel` left them."""
    (num_rows, vocab_size), num_parts = logits.shape, peaks.shape[1]
    parts = min(_BLOCK // _PART, power_of_2(num_parts))
    num_blocks = cdiv(num_parts, parts)
    all_parts, blocks = power_of_2(num_parts), power_of_2(num_blocks)
    new = lambda dtype, *shape: torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)  # noqa: E731
    counts = new(torch.int32, num_blocks, BINS.value)
    best, total, limit, sizes = new(torch.float32), new(torch.float32), new(torch.int32), new(torch.int32, num_blocks)
    values, listed = new(torch.float32, num_blocks, _REGION), new(torch.int32, num_blocks, _REGION)
    shape = (logits.stride(0), vocab_size)
    histogram_kernel[(num_rows, num_blocks)](
        logits, *rules, peaks, counts, *shape, num_parts, BLOCK=parts * _PART, PARTS=all_parts, num_warps=8
    )  # fmt: skip
    cut_kernel[(num_rows,)](
        *rules, peaks, sums, counts, best, total, limit, vocab_size, num_parts, num_blocks, PARTS=all_parts, BLOCKS=blocks, num_warps=4
    )  # fmt: skip
    gather_kernel[(num_rows, num_blocks)](
        logits, *rules, peaks, best, limit, sizes, values, listed, *shape, num_parts, REGION=_REGION, PARTS=parts, num_warps=1
    )  # fmt: skip
    filtered_draw_kernel[(num_rows,)](
        logits, *rules, *keys, best, total, sizes, values, listed, tokens, *shape, num_blocks,
        REGION=_REGION, BLOCKS=blocks, SLOTS=max(1, _LANES // blocks), num_warps=16,
    )  # fmt: skip
