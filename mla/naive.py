"""Naive form: expand keys and values of every head, as the paper writes it (arXiv 2405.04434, section 2.1). For compute-bound prefill.

A chunk behind a cached prefix is attended in pieces: first itself, causally, then the prefix, expanded in pieces of bounded size;
the partial results are joined by their log-sum-exp.
"""

import torch

from hw.api import Ops, Segments
from mla.metadata import PrefillMeta


def expand(ops: Ops, latent: torch.Tensor, key: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """latent `[S, L]`, rotated key `[S, r]`, w_uk `[H, n, L]`, w_uv `[H, v, L]` -> keys `[S, H, n + r]`, values `[S, H, v]`."""
    num_heads, nope, _ = w_uk.shape
    k_nope = ops.linear(latent, w_uk.flatten(0, 1)).view(-1, num_heads, nope)
    values = ops.linear(latent, w_uv.flatten(0, 1)).view(-1, num_heads, w_uv.shape[1])
    return torch.cat((k_nope, key[:, None].expand(-1, num_heads, -1)), dim=-1), values


def naive_prefill(
    ops: Ops,
    q: torch.Tensor,
    latent: torch.Tensor,
    key: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    cache: torch.Tensor,
    meta: PrefillMeta,
    scale: float,
    workspace_tokens: int,
) -> torch.Tensor:
    """q `[T, H, n + r]` of all chunks, latent `[T, L]` and key `[T, r]` of the same tokens -> `[T, H, v]`.

    At most about `workspace_tokens` prefix tokens are expanded at a time.
    """
    k, v = expand(ops, latent, key, w_uk, w_uv)
    out, lse = ops.mla_prefill(q, k, v, meta.queries, meta.queries, scale, causal=True)
    for first, lens in context_pieces(meta.context_lens, workspace_tokens):
        entries = ops.latent_gather(cache, meta.page_table, first, lens)
        k, v = expand(ops, entries[:, : latent.shape[1]], entries[:, latent.shape[1] :], w_uk, w_uv)
        starts = torch.tensor([0, *lens], dtype=torch.int32, device=q.device).cumsum(0, dtype=torch.int32)
        piece_out, piece_lse = ops.mla_prefill(q, k, v, meta.queries, Segments(lens, starts), scale, causal=False)
        out, lse = ops.merge_attention(out, lse, piece_out, piece_lse)
    return out


def context_pieces(context_lens: list[int], workspace_tokens: int):
    """Cut prefixes into rounds: yields (first, lens) for each round, one entry for each sequence, lens 0 where a prefix is done."""
    longest = max(context_lens)
    share = max(1, workspace_tokens // max(1, sum(length > 0 for length in context_lens)))
    for low in range(0, longest, share):
        yield [min(low, length) for length in context_lens], [max(0, min(share, length - low)) for length in context_lens]
