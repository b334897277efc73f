"""Naive form: expand keys and values of every head, as the paper writes it (arXiv 2405.04434, section 2.1). For compute-bound prefill.

A chunk behind a cached prefix is attended with it, in one go, if all prefixes of the step fit the workspace. Longer ones are attended in
pieces: first the chunk itself, causally, then the prefix, expanded in pieces of bounded size; the partial results are joined by their
log-sum-exp.
"""

import torch

from hw.api import Ops, Segments
from mla.metadata import PrefillMeta


def naive_prefill(
    ops: Ops,
    q: torch.Tensor,
    latent: torch.Tensor,
    key: torch.Tensor,
    kv_up: torch.Tensor,
    cache: torch.Tensor,
    meta: PrefillMeta,
    scale: float,
    workspace_tokens: int,
) -> torch.Tensor:
    """q `[T, H, n + r]` of all chunks, rotated, latent `[T, L]` and key `[T, r]` of the same tokens, kv_up `[H, n + v, L]` -> `[T, H, v]`.

    At most about `workspace_tokens` prefix tokens are expanded at a time.
    """
    nope = q.shape[2] - key.shape[1]
    if 0 < sum(meta.context_lens) <= workspace_tokens:
        known = meta.known
        entries = ops.latent_gather(cache, meta.page_table, [0] * len(known.lens), known.lens)
        k, v = ops.expand_latent(entries[:, : latent.shape[1]], entries[:, latent.shape[1] :], kv_up, nope)
        return ops.mla_prefill(q, k, v, meta.queries, known, scale, causal=True)[0]
    k, v = ops.expand_latent(latent, key, kv_up, nope)
    out, lse = ops.mla_prefill(q, k, v, meta.queries, meta.queries, scale, causal=True)
    for first, lens in context_pieces(meta.context_lens, workspace_tokens):
        contexts = meta.seq_lens - meta.queries.starts.diff()  # lengths on the device, so that nothing is sent there
        entries = ops.latent_gather(cache, meta.page_table, first, lens)
        k, v = ops.expand_latent(entries[:, : latent.shape[1]], entries[:, latent.shape[1] :], kv_up, nope)
        ends = (contexts - max(first)).clamp(0, max(lens)).cumsum(0, dtype=torch.int32)
        starts = torch.nn.functional.pad(ends, (1, 0))
        piece_out, piece_lse = ops.mla_prefill(q, k, v, meta.queries, Segments(lens, starts), scale, causal=False)
        out, lse = ops.merge_attention(out, lse, piece_out, piece_lse)
    return out


def context_pieces(context_lens: list[int], workspace_tokens: int):
    """Cut prefixes into rounds: yields (first, lens) for each round, one entry for each sequence, lens 0 where a prefix is done."""
    longest = max(context_lens)
    share = max(1, workspace_tokens // max(1, sum(length > 0 for length in context_lens)))
    for low in range(0, longest, share):
        yield [min(low, length) for length in context_lens], [max(0, min(share, length - low)) for length in context_lens]
