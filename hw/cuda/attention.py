"""Latent attention: FlashMLA where it fits, Triton kernels for the rest."""

from itertools import accumulate
from types import ModuleType

import torch

from hw.api import LatentDims
from hw.cuda.decode import triton_decode
from hw.cuda.launch import cdiv, power_of_2
from hw.cuda.layout import quantized_rows
from hw.cuda.rules import DECODE, FLASH_LATENT, FLASH_MLA
from hw.cuda.triton_elementwise import latent_gather_kernel, latent_write_kernel
from hw.cuda.upload import send
from hw.quant import QuantTensor
from hw.rules import Decode, choose

_GATHER_ROWS = 16


class AttentionOps:
    """See `hw.api.Ops`. `flash_mla`: the library, or None to run every shape on our own kernels."""

    def __init__(self, flash_mla: ModuleType | None):
        self._flash_mla = flash_mla
        self._absent_attention = frozenset({FLASH_MLA}) if flash_mla is None else frozenset()

    def latent_write(self, down, q_norm, kv_norm, eps, positions, table, cache, slots, quant=False):
        rank, dim, num_tokens, q_rank = kv_norm.shape[0], cache.shape[-1], down.shape[0], 0 if q_norm is None else q_norm.shape[0]
        assert down.shape[1] == q_rank + dim and down.stride(1) == 1, (down.shape, down.stride(), q_rank, dim)
        assert cache.is_contiguous() and cache.dtype == down.dtype, (cache.shape, cache.stride(), cache.dtype)
        latent, key, q_dense = (
            torch.empty((num_tokens, size), dtype=down.dtype, device=down.device) for size in (rank, dim - rank, q_rank)
        )
        q = None if q_norm is None else quantized_rows(num_tokens, q_rank, down.device) if quant else q_dense
        if num_tokens:
            data, scale = (q.data, q.scale) if isinstance(q, QuantTensor) else (q, None)
            half = (dim - rank) // 2
            latent_write_kernel[(num_tokens, 1 if q is None else 2)](
                down, q_norm, kv_norm, positions, table, slots, cache, data, scale, latent, key,
                down.stride(0), 0 if scale is None else scale.stride(1), q_rank, rank, half, eps,
                HAS_Q=q is not None, QUANT=scale is not None, BLOCK_Q=power_of_2(max(1, q_rank)),
                BLOCK_RANK=power_of_2(rank), BLOCK_HALF=power_of_2(half),
            )  # fmt: skip
        return q, latent, key

    def latent_gather(self, cache, page_table, first, lens):
        page_size, dim = cache.shape[1:]
        assert cache.is_contiguous() and (page_table.stride(1) == 1 or not page_table.numel()), (cache.shape, page_table.stride())
        out = torch.empty((sum(lens), dim), dtype=cache.dtype, device=cache.device)
        if not out.shape[0]:
            return out
        places = send(torch.tensor([first, lens, list(accumulate(lens[:-1], initial=0))]), cache.device)
        grid = (len(lens), cdiv(max(lens), _GATHER_ROWS))
        latent_gather_kernel[grid](
            cache, page_table, places, out, len(lens), page_table.stride(0), page_size, dim,
            ROWS=_GATHER_ROWS, BLOCK_DIM=power_of_2(dim),
        )  # fmt: skip
        return out

    def decode_plan(self):
        return None if self._flash_mla is None else self._flash_mla.get_mla_metadata()[0]

    def mla_decode(self, q, cache, page_table, seq_lens, max_seq_len, kv_lora_rank, scale, plan=None, with_lse=False):
        num_seqs, query_len, num_heads, dim = q.shape
        assert q.stride(3) == 1 and cache.is_contiguous() and q.dtype == cache.dtype, (q.stride(), q.dtype, cache.dtype)
        if not num_seqs:
            out = torch.empty((0, query_len, num_heads, kv_lora_rank), dtype=q.dtype, device=q.device)
            return out, torch.empty(out.shape[:3], device=q.device) if with_lse else None
        shape = Decode(q.dtype, num_seqs, query_len, num_heads, kv_lora_rank, dim - kv_lora_rank, cache.shape[1], max_seq_len)
        if choose("mla_decode", DECODE, shape, self._absent_attention).served_by == FLASH_MLA and page_table.shape[1]:
            return self._flash_decode(q, cache, page_table, seq_lens, scale, plan, with_lse)
        out, lse = triton_decode(q, cache, page_table, seq_lens, max_seq_len, kv_lora_rank, scale)
        return out, lse if with_lse else None

    def _flash_decode(self, q, cache, page_table, seq_lens, scale, plan, with_lse):
        # The first call of a step fills the plan in with its schedule; the other layers find it there.
        schedule = self.decode_plan() if plan is None else plan
        out, lse = self._flash_mla.flash_mla_with_kvcache(
            q, cache.unsqueeze(2), page_table, seq_lens, FLASH_LATENT, schedule, softmax_scale=scale, causal=True
        )
        if not with_lse:
            return out, None
        # FlashMLA gives a query that sees nothing +inf.
        lse = lse.transpose(1, 2)
        return out, torch.where(lse == torch.inf, -torch.inf, lse)

    def prefers_absorbed(self, query_len, context_len, dims: LatentDims):
        # Per head and context token: absorbed pays 2L + r multiplications a query, naive pays the expansion once and n + r + v a query.
        absorbed = query_len * (2 * dims.latent + dims.rope)
        naive = dims.latent * (dims.nope + dims.value) + query_len * (dims.nope + dims.rope + dims.value)
        return context_len > 0 and absorbed < naive
