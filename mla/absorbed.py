"""Absorbed form: fold the up-projections into query and output and attend the latents themselves (arXiv 2405.04434, section 2.1.2).

    score = (q_nope W_UK) . latent + q_rope . key        out = (sum of p * latent) W_UV

One key of L + r values serves all heads, so a decode step reads each cached token once, not once per head.
"""

import torch

from hw.api import Ops
from mla.metadata import DecodeMeta, PrefillMeta


def absorbed_decode(ops: Ops, q: torch.Tensor, cache: torch.Tensor, meta: DecodeMeta, latent: int, scale: float) -> torch.Tensor:
    """q `[num_tokens, H, L + r]` absorbed queries, latent: L -> attended latents `[num_tokens, H, L]`."""
    shaped = q.view(meta.num_seqs, meta.query_len, *q.shape[1:])
    out, _ = ops.mla_decode(shaped, cache, meta.page_table, meta.seq_lens, meta.max_seq_len, latent, scale, meta.plan)
    return out.flatten(0, 1)


def absorbed_chunk(
    ops: Ops, q: torch.Tensor, cache: torch.Tensor, meta: PrefillMeta, seq_idx: int, latent: int, scale: float
) -> torch.Tensor:
    """One prefill chunk as a single sequence with many queries; its own latents are in the cache already. Shapes as above."""
    one = slice(seq_idx, seq_idx + 1)
    max_seq_len = meta.context_lens[seq_idx] + meta.queries.lens[seq_idx]
    out, _ = ops.mla_decode(q[None], cache, meta.page_table[one], meta.seq_lens[one], max_seq_len, latent, scale)
    return out[0]
