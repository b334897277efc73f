"""Products of each head with its own matrix, around absorbed attention: kernels of ours for few tokens, cuBLAS for many."""

import torch

from hw.cuda.launch import cdiv, power_of_2
from hw.cuda.layout import GROUP, quantized_rows
from hw.cuda.quantize import quantize
from hw.cuda.rules import ABSORB, TRITON, UNABSORB, Absorb
from hw.cuda.triton_absorb import absorb_query_kernel, unabsorb_kernel
from hw.rules import choose

_MANY_HEADS = 64  # that give every multiprocessor work


class AbsorbOps:
    """See `hw.api.Ops`."""

    def absorb_query(self, q, positions, table, w_uk):
        num_tokens, num_heads, dim = q.shape
        nope, latent = w_uk.shape[1:]
        assert q.stride(2) == w_uk.stride(2) == table.stride(1) == 1 and dim == nope + table.shape[1], (q.shape, w_uk.shape, table.shape)
        out = torch.empty((num_tokens, num_heads, latent + dim - nope), dtype=q.dtype, device=q.device)
        if not num_tokens:
            return out
        if choose("absorb_query", ABSORB, Absorb(q.dtype, num_tokens)).served_by != TRITON:
            torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=out[..., :latent].transpose(0, 1))
            self.rope(q[..., nope:], positions, table, out=out[..., latent:])
            return out
        block_m, block_n, half = 16 if num_tokens <= 16 else 64, 128, (dim - nope) // 2
        grid = (cdiv(num_tokens, block_m), cdiv(latent, block_n) + 1, num_heads)
        absorb_query_kernel[grid](
            q, w_uk, positions, table, out, num_tokens, q.stride(0), q.stride(1), w_uk.stride(0), w_uk.stride(1), out.stride(0),
            out.stride(1), nope, latent, half, BLOCK_M=block_m, BLOCK_K=max(16, power_of_2(nope)), BLOCK_N=block_n,
            BLOCK_HALF=power_of_2(half), num_warps=4,
        )  # fmt: skip
        return out

    def unabsorb(self, out, w_uv, quant=False):
        num_tokens, num_heads, latent = out.shape
        value = w_uv.shape[1]
        assert out.stride(2) == w_uv.stride(2) == 1 and not (quant and num_heads * value % GROUP), (out.stride(), w_uv.stride(), value)
        one_group = value == GROUP  # a head's values share a scale
        use_kernel = choose("unabsorb", UNABSORB, Absorb(out.dtype, num_tokens)).served_by == TRITON
        if not use_kernel or (quant and not one_group):
            values = torch.empty((num_tokens, num_heads, value), dtype=out.dtype, device=out.device)
            torch.bmm(out.transpose(0, 1), w_uv.transpose(1, 2), out=values.transpose(0, 1))
            return quantize(values.flatten(1)) if quant else values.flatten(1)
        rows = quantized_rows(num_tokens, num_heads * value, out.device) if quant else None
        data = torch.empty((num_tokens, num_heads * value), dtype=out.dtype, device=out.device) if rows is None else rows.data
        if num_tokens:
            block_m, block_k, block_n, num_warps, num_stages = _unabsorb_tile(num_tokens, num_heads, value, quant)
            unabsorb_kernel[(cdiv(num_tokens, block_m), num_heads, cdiv(value, block_n))](
                out, w_uv, data, None if rows is None else rows.scale, num_tokens, out.stride(0), out.stride(1), w_uv.stride(0),
                w_uv.stride(1), data.stride(0), 0 if rows is None else rows.scale.stride(1), value, latent,
                QUANT=quant, BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_N=block_n, NUM_STAGES=num_stages, num_warps=num_warps,
            )  # fmt: skip
        return data if rows is None else rows


def _unabsorb_tile(num_tokens: int, num_heads: int, value: int, quant: bool) -> tuple[int, int, int, int, int]:
    """Tokens, channels and values at a time, warps and stages."""
    whole = max(16, power_of_2(value))
    if num_heads < _MANY_HEADS and not quant:  # few heads fill the GPU only in pieces
        return (16, 128, min(32, whole), 4, 4) if num_tokens <= 32 else (64, 128, min(32 if num_tokens <= 64 else 64, whole), 4, 4)
    if num_tokens <= 32:
        return (16, 64, whole, 8, 8) if num_tokens <= 16 else (16, 128, whole, 4, 3)
    return (64, 64, whole, 8, 4) if num_tokens <= 128 else (128, 64, whole, 8, 3)
