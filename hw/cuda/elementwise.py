"""Ops that pass once over rows, in Triton."""

import torch

from hw.api import Activation
from hw.cuda.launch import cdiv, power_of_2
from hw.cuda.layout import masked_rows, quantized_masked_rows, quantized_rows
from hw.cuda.triton_elementwise import rms_norm_kernel, rope_kernel, silu_mul_kernel, spread_key_kernel

# Of `silu_mul` where experts have counts: programs that fill the GPU, fewest rows of an expert at once.
_PROGRAMS, _LEAST_ROWS = 1024, 8


def num_warps(block: int) -> int:
    """Of a program that holds one row of `block` elements."""
    return min(16, max(1, block // 512))


def spread_key(key: torch.Tensor, out: torch.Tensor) -> None:
    """Copy key `[S, r]` to every head of out `[S, H, r]`, which may be a view."""
    num_tokens, num_heads, dim = out.shape
    assert key.stride(1) == out.stride(2) == 1, (key.stride(), out.stride())
    if not out.numel():
        return
    width = power_of_2(dim)
    heads = min(power_of_2(num_heads), max(1, 4096 // width))
    spread_key_kernel[(num_tokens, cdiv(num_heads, heads))](
        key, out, key.stride(0), out.stride(0), out.stride(1), num_heads, dim, BLOCK_HEADS=heads, BLOCK_DIM=width
    )  # fmt: skip


class ElementwiseOps:
    """See `hw.api.Ops`."""

    def rms_norm(self, x, weight, eps):
        assert x.ndim == 2 and x.stride(1) == 1 and x.dtype == weight.dtype, (x.shape, x.stride(), x.dtype, weight.dtype)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._norm(x, None, weight, eps, Activation(out), None)
        return out

    def add_rms_norm(self, x, residual, weight, eps, dense=True, quant=False):
        assert x.shape == residual.shape and x.dtype == residual.dtype == weight.dtype, (x.shape, residual.shape)
        assert x.stride(1) == residual.stride(1) == 1, (x.stride(), residual.stride())
        out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        forms = Activation(out if dense else None, quantized_rows(*x.shape, x.device) if quant else None)
        self._norm(x, residual, weight, eps, forms, total)
        return forms, total

    def _norm(self, x, residual, weight, eps, forms, total):
        num_rows, width = x.shape
        if not num_rows:
            return
        block = power_of_2(width)
        data, scale, scale_stride = (
            (None, None, 0) if forms.quant is None else (forms.quant.data, forms.quant.scale, forms.quant.scale.stride(1))
        )
        strides = x.stride(0), 0 if residual is None else residual.stride(0), scale_stride
        rms_norm_kernel[(num_rows,)](
            x, residual, weight, forms.dense, data, scale, total, *strides, width, eps,
            HAS_RESIDUAL=residual is not None, DENSE=forms.dense is not None, QUANT=forms.quant is not None,
            BLOCK=block, num_warps=num_warps(block),
        )  # fmt: skip

    def rope(self, x, positions, table, out=None):
        num_tokens, num_heads, dim = x.shape
        assert x.stride(2) == 1 and table.is_contiguous() and table.shape[1] == dim, (x.stride(), table.shape)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        assert out.shape == x.shape and out.stride(2) == 1, (out.shape, out.stride())
        if not out.numel():
            return out
        half = power_of_2(dim // 2)
        heads = min(power_of_2(num_heads), max(1, 1024 // half))
        grid = (num_tokens, cdiv(num_heads, heads))
        rope_kernel[grid](
            x, positions, table, out, x.stride(0), x.stride(1), out.stride(0), out.stride(1), num_heads, dim // 2,
            BLOCK_HEADS=heads, BLOCK_HALF=half,
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up, quant=False, counts=None):
        assert gate_up.ndim == (2 if counts is None else 3) and gate_up.stride(-1) == 1, (gate_up.shape, gate_up.stride())
        x = gate_up[None] if counts is None else gate_up
        num_experts, capacity, inner = x.shape[0], x.shape[1], x.shape[2] // 2
        if counts is None:
            out = quantized_rows(capacity, inner, x.device) if quant else torch.empty((capacity, inner), dtype=x.dtype, device=x.device)
        elif quant:
            out = quantized_masked_rows(num_experts, capacity, inner, x.device)
        else:
            out = masked_rows(num_experts, capacity, inner, x.dtype, x.device)
        if not num_experts * capacity * inner:
            return out
        data, scale = (out.data, out.scale) if quant else (out, None)
        strides = x.stride(0), x.stride(1), data.stride(0), *((scale.stride(0), scale.stride(-1)) if quant else (0, 0))
        block = min(2048, power_of_2(inner))
        at_once = capacity if counts is None else min(capacity, max(_LEAST_ROWS, _PROGRAMS // num_experts))
        silu_mul_kernel[(num_experts * at_once, cdiv(inner, block))](
            x, data, scale, counts, inner, at_once, *strides,
            HAS_COUNTS=counts is not None, QUANT=quant, BLOCK=block, num_warps=num_warps(block),
        )  # fmt: skip
        return out
