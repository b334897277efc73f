"""Latent attention: FlashMLA where it fits, Triton kernels for the rest."""

from types import ModuleType

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from hw.api import LatentDims, Segments
from hw.cuda.early import early
from hw.cuda.elementwise import num_warps
from hw.cuda.layout import quantized_rows
from hw.cuda.rules import DECODE, FLASH_LATENT, FLASH_MLA
from hw.cuda.triton_decode import decode_kernel, join_splits_kernel
from hw.cuda.triton_elementwise import latent_gather_kernel, latent_write_kernel
from hw.cuda.triton_prefill import merge_kernel, prefill_kernel
from hw.quant import QuantTensor
from hw.rules import Decode, choose

# Programs that fill the GPU, and the most pieces a sequence is cut into.
_WANTED_PROGRAMS, _MAX_SPLITS = 264, 64
_GATHER_ROWS = 16


def prefill_blocks(dtype: torch.dtype, longest: int) -> dict[str, int]:
    """Tile sizes of the prefill kernel for at most `longest` queries a sequence."""
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    block_m = 16 if longest <= 16 else 64 if longest <= 64 else 128
    return {"BLOCK_M": block_m, "BLOCK_N": 64, "num_warps": 8 if block_m == 128 else 4, "num_stages": 3 if block_m == 128 else 2}


def _bulk_copies(x: torch.Tensor) -> bool:
    """Whether the copy engine takes x `[S, H, d]` as a matrix: contiguous, 16-byte rows, something there."""
    return x.is_contiguous() and x.numel() > 0 and x.shape[1] * x.shape[2] % 8 == 0 and x.data_ptr() % 16 == 0


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
                HAS_Q=q is not None, QUANT=scale is not None, BLOCK_Q=triton.next_power_of_2(max(1, q_rank)),
                BLOCK_RANK=triton.next_power_of_2(rank), BLOCK_HALF=triton.next_power_of_2(half), **early(down.device),
            )  # fmt: skip
        return q, latent, key

    def latent_gather(self, cache, page_table, first, lens):
        page_size, dim = cache.shape[1:]
        assert cache.is_contiguous() and (page_table.stride(1) == 1 or not page_table.numel()), (cache.shape, page_table.stride())
        out = torch.empty((sum(lens), dim), dtype=cache.dtype, device=cache.device)
        if not out.shape[0]:
            return out
        lengths = torch.tensor(lens)
        places = torch.stack((torch.tensor(first), lengths, lengths.cumsum(0) - lengths)).to(cache.device)
        grid = (len(lens), triton.cdiv(max(lens), _GATHER_ROWS))
        latent_gather_kernel[grid](
            cache, page_table, places, out, len(lens), page_table.stride(0), page_size, dim,
            ROWS=_GATHER_ROWS, BLOCK_DIM=triton.next_power_of_2(dim),
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
        if choose("mla_decode", DECODE, shape, self._absent_attention).library == FLASH_MLA and page_table.shape[1]:
            return self._flash_decode(q, cache, page_table, seq_lens, scale, plan, with_lse)
        out, lse = self._triton_decode(q, cache, page_table, seq_lens, max_seq_len, kv_lora_rank, scale)
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

    def _triton_decode(self, q, cache, page_table, seq_lens, max_seq_len, kv_lora_rank, scale):
        num_seqs, query_len, num_heads, dim = q.shape
        num_rows, wide, fp32 = query_len * num_heads, kv_lora_rank >= 256, q.dtype == torch.float32
        block_m = 16 if fp32 or num_rows <= 16 else (32 if wide or num_rows <= 32 else 64)
        block_n = 16 if fp32 and wide else 32 if fp32 or wide else 64
        block_l = max(16, triton.next_power_of_2(kv_lora_rank))
        num_blocks = triton.cdiv(num_rows, block_m)
        num_splits = max(1, min(_WANTED_PROGRAMS // (num_seqs * num_blocks), max_seq_len // (4 * block_n), _MAX_SPLITS))
        final = torch.empty((num_seqs, query_len, num_heads, kv_lora_rank), dtype=q.dtype, device=q.device)
        lse = torch.empty((num_seqs, query_len, num_heads), device=q.device)
        parts, part_lse = final, lse
        if num_splits > 1:
            parts = torch.empty((num_splits, *final.shape), device=q.device)
            part_lse = torch.empty((num_splits, *lse.shape), device=q.device)
        decode_kernel[(num_seqs, num_blocks, num_splits)](
            q, cache, page_table, seq_lens, parts, part_lse, q.stride(0), q.stride(1), q.stride(2), page_table.stride(0),
            num_heads, num_rows, query_len, cache.shape[1], kv_lora_rank, dim - kv_lora_rank, scale, num_splits,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_L=block_l, BLOCK_R=max(16, triton.next_power_of_2(dim - kv_lora_rank)),
            num_warps=8 if wide else 4, num_stages=2,
        )  # fmt: skip
        if num_splits > 1:
            join_splits_kernel[(num_seqs * num_rows,)](
                parts, part_lse, final, lse, num_seqs * num_rows, kv_lora_rank, num_splits,
                BLOCK_SPLITS=triton.next_power_of_2(num_splits), BLOCK_L=block_l,
            )  # fmt: skip
        return final, lse

    def mla_prefill(self, q, k, v, q_segments: Segments, k_segments: Segments, scale, causal):
        num_tokens, num_heads, key_dim = q.shape
        value_dim = v.shape[2]
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1 and q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
        out = torch.empty((num_tokens, num_heads, value_dim), dtype=q.dtype, device=q.device)
        lse = torch.empty((num_tokens, num_heads), device=q.device)
        if not num_tokens:
            return out, lse
        longest = max(q_segments.lens)
        # The key dim in two parts: the largest power of two within it, and what is left.
        part_a = max(16, 1 << (key_dim.bit_length() - 1))
        part_b = 0 if key_dim <= part_a else max(16, triton.next_power_of_2(key_dim - part_a))
        part_v = max(16, triton.next_power_of_2(value_dim))
        blocks = prefill_blocks(q.dtype, longest)
        exact = part_a + part_b == key_dim and part_v == value_dim
        tma = exact and q.dtype == torch.bfloat16 and all(_bulk_copies(x) for x in (k, v))
        sources = (k, k, v)
        if tma:
            widths = (part_a, part_b or part_a, part_v)
            sources = tuple(
                TensorDescriptor.from_tensor(x.view(x.shape[0], -1), [blocks["BLOCK_N"], width])
                for x, width in zip(sources, widths, strict=True)
            )
        grid = (triton.cdiv(longest, blocks["BLOCK_M"]), num_heads, len(q_segments.lens))
        prefill_kernel[grid](
            q, *sources, q_segments.starts, k_segments.starts, out, lse, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            v.stride(0), v.stride(1), num_heads, key_dim, value_dim, scale,
            CAUSAL=causal, TMA=tma, BLOCK_A=part_a, BLOCK_B=part_b, BLOCK_V=part_v, **blocks,
        )  # fmt: skip
        return out, lse

    def merge_attention(self, out_a, lse_a, out_b, lse_b):
        out_a, lse_a, out_b, lse_b = (x.contiguous() for x in (out_a, lse_a, out_b, lse_b))
        out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
        if out.numel():
            block = triton.next_power_of_2(out.shape[-1])
            merge_kernel[(lse.numel(),)](
                out_a, lse_a, out_b, lse_b, out, lse, out.shape[-1], BLOCK=block, num_warps=num_warps(block)
            )  # fmt: skip
        return out, lse

    def prefers_absorbed(self, query_len, context_len, dims: LatentDims):
        # Per head and context token: absorbed pays 2L + r multiplications a query, naive pays the expansion once and n + r + v a query.
        absorbed = query_len * (2 * dims.latent + dims.rope)
        naive = dims.latent * (dims.nope + dims.value) + query_len * (dims.nope + dims.rope + dims.value)
        return context_len > 0 and absorbed < naive
