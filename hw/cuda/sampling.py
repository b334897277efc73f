"""From logits to tokens: penalties, filters and draws in Triton, log-probabilities in torch."""

import torch
import triton

from hw.api import Logprobs, PenaltyInputs, SampleInputs
from hw.cuda.triton_sampling import best_block_kernel, border_kernel, draw_kernel, penalize_kernel, rough_draw_kernel

_BLOCK = 4096  # tokens a program
_BORDER_BLOCK, _BORDER_WARPS = 8192, 32  # tokens at a time of the one program that searches a row


class SamplingOps:
    """See `hw.api.Ops`. Draws use the same noise as every backend, so equal logits give equal tokens."""

    def penalize(self, logits, inputs: PenaltyInputs):
        num_rows, vocab_size = inputs.output_counts.shape
        assert logits.stride(1) == 1 and inputs.prompt_mask.is_contiguous() and inputs.output_counts.is_contiguous()
        if not num_rows or not vocab_size:
            return
        block = min(_BLOCK, triton.next_power_of_2(vocab_size))
        penalize_kernel[(num_rows, triton.cdiv(vocab_size, block))](
            logits, inputs.rows, inputs.prompt_mask, inputs.output_counts, inputs.presence, inputs.frequency, inputs.repetition,
            logits.stride(0), vocab_size, BLOCK=block, num_warps=8,
        )  # fmt: skip

    def sample(self, logits, inputs: SampleInputs):
        num_rows, vocab_size = logits.shape
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
        tokens = torch.empty((num_rows,), dtype=torch.int64, device=logits.device)
        if not num_rows:
            return tokens
        border = None
        filtered = inputs.any_sampled and inputs.any_filtered
        if filtered:
            border = torch.empty((num_rows,), device=logits.device)
            block = min(_BORDER_BLOCK, max(16, triton.next_power_of_2(vocab_size)))
            border_kernel[(num_rows,)](
                logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, border, logits.stride(0), vocab_size,
                BLOCK=block, num_warps=_BORDER_WARPS if block > 1024 else 4,
            )  # fmt: skip
        quads = min(_BLOCK // 4, max(4, triton.next_power_of_2(triton.cdiv(vocab_size, 4))))
        num_blocks = triton.cdiv(vocab_size, 4 * quads)
        values = torch.empty((num_rows, num_blocks), dtype=torch.float64, device=logits.device)
        firsts = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
        keys = (inputs.temperature, inputs.seed, inputs.sequence_idx, inputs.position, border)
        rough = None
        if inputs.any_sampled:
            rough = torch.empty((num_rows, num_blocks), device=logits.device)
            rough_draw_kernel[(num_rows, num_blocks)](
                logits, *keys, rough, logits.stride(0), vocab_size, FILTERED=filtered, QUADS=quads, num_warps=8
            )  # fmt: skip
        draw_kernel[(num_rows, num_blocks)](
            logits, *keys, rough, values, firsts, logits.stride(0), vocab_size,
            SAMPLED=inputs.any_sampled, FILTERED=filtered, QUADS=quads, BLOCKS=triton.next_power_of_2(num_blocks), num_warps=8,
        )  # fmt: skip
        best_block_kernel[(num_rows,)](values, firsts, tokens, num_blocks, BLOCK=triton.next_power_of_2(num_blocks))
        return tokens

    def logprobs(self, logits, tokens, num_top):
        logprobs = logits.log_softmax(-1)
        token = logprobs.gather(1, tokens[:, None])
        top = logprobs.topk(num_top, dim=-1)
        return Logprobs(token[:, 0], (logprobs > token).sum(-1) + 1, top.indices, top.values)
