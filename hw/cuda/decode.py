"""Absorbed attention over pages on Triton: how its work is cut."""

from dataclasses import dataclass

import torch

from hw.cuda.launch import cdiv, power_of_2
from hw.cuda.triton_decode import decode_kernel, join_splits_kernel

_PROGRAMS = 132  # one for each multiprocessor of an H200
_MOST_SPLITS = 128
_MANY_ROWS = 512  # from which tiles of many rows read less and still fill the GPU
_JOIN = 4096  # elements that a program of the join holds


@dataclass(frozen=True)
class Tiles:
    """Rows and tokens of one program's products."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def tiles(dtype: torch.dtype, num_seqs: int, num_rows: int, latent: int, rope: int) -> Tiles:
    """For `num_seqs` sequences of `num_rows` queries times heads."""
    wide = latent >= 256
    if dtype == torch.float32:
        return Tiles(16, 16 if wide else 32, 8 if wide else 4, 2)
    if not wide:
        return Tiles(16 if num_rows <= 16 else 32 if num_rows <= 32 else 64, 64, 4, 2)
    if num_rows >= 64 and num_seqs * num_rows >= _MANY_ROWS and latent <= 512 and rope <= 64:
        return Tiles(64, 64, 8, 2)
    return Tiles(16, 32, 4, 3)


def triton_decode(q, cache, page_table, seq_lens, max_seq_len: int, latent: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hw.api.Ops.mla_decode`; there is a sequence."""
    num_seqs, query_len, num_heads, dim = q.shape
    num_rows, page_size, rope = query_len * num_heads, cache.shape[1], dim - latent
    cut = tiles(q.dtype, num_seqs, num_rows, latent, rope)
    num_blocks = cdiv(num_rows, cut.rows)
    num_splits = max(1, min(_PROGRAMS // (num_seqs * num_blocks), cdiv(max_seq_len, cut.tokens), _MOST_SPLITS))
    out = torch.empty((num_seqs, query_len, num_heads, latent), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_seqs, query_len, num_heads), device=q.device)
    parts, part_lse = out, lse
    if num_splits > 1:
        parts = torch.empty((num_splits, *out.shape), device=q.device)
        part_lse = torch.empty((num_splits, *lse.shape), device=q.device)
    block_l, block_r = (max(16, power_of_2(size)) for size in (latent, rope))
    decode_kernel[(num_blocks, num_splits, num_seqs)](
        q, cache, page_table, seq_lens, parts, part_lse, q.stride(0), q.stride(1), q.stride(2), page_table.stride(0),
        num_heads, num_rows, query_len, page_size, latent, rope, scale, num_splits,
        BLOCK_M=cut.rows, BLOCK_N=cut.tokens, BLOCK_L=block_l, BLOCK_R=block_r, EXACT=(block_l, block_r) == (latent, rope),
        ONE_PAGE=page_size % cut.tokens == 0, SPLIT=num_splits > 1, num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        block_splits = power_of_2(num_splits)
        block = min(block_l, max(32, _JOIN // block_splits))
        join_splits_kernel[(num_seqs * num_rows, cdiv(latent, block))](
            parts, part_lse, out, lse, num_seqs * num_rows, latent, num_splits, BLOCK_SPLITS=block_splits, BLOCK_L=block,
        )  # fmt: skip
    return out, lse
