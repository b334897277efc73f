"""Matrix products: cuBLAS and CUTLASS for bf16 and fp32, DeepGEMM for fp8 and for large masked groups, Triton for few rows and the rest.

FP8 weights meet bf16 activations that are quantised per token in groups of 128, where the shape fits (`quantizes`): blocks of 128 x 128,
K a multiple of 128, N of 64. Other shapes, and fp32 activations, take the declared composite: dequantise, then the product in the
model dtype.
"""

from dataclasses import replace
from types import ModuleType

import torch

from hw.api import ExpertRows, Matrix, Rows
from hw.cuda.elementwise import spread_key
from hw.cuda.launch import cdiv
from hw.cuda.layout import ALIGN_ROWS, masked_rows, whole
from hw.cuda.quantize import quantize, quantize_masked
from hw.cuda.rules import CUTLASS, DEEP_GEMM, FEW_ROWS, GROUPED, LINEAR, MASKED, TAKES_FP8
from hw.cuda.small_gemm import few_rows_linear, few_rows_masked
from hw.cuda.triton_grouped import grouped_kernel
from hw.cuda.upload import send
from hw.quant import QuantTensor, dequantize
from hw.rules import Candidate, Product, choose

_MOST_CHOSEN = 4096  # products of some number of rows whose library is remembered


class GemmOps:
    """See `hw.api.Ops`. `deep_gemm`: the library, or None to run every shape on the composites."""

    def __init__(self, deep_gemm: ModuleType | None):
        self._deep_gemm = deep_gemm
        self._absent_products = frozenset({FEW_ROWS, DEEP_GEMM}) if deep_gemm is None else frozenset()
        self._chosen: dict[tuple, str] = {}  # asking the tables takes longer than the rest of a product's launch

    def quantizes(self, weight, dtype):
        table = LINEAR if len(weight.shape) == 2 else MASKED
        return isinstance(weight, QuantTensor) and self._library(table, 1, dtype, weight) in TAKES_FP8

    def linear(self, x, weight):
        library = self._library(LINEAR, x.shape[0], dense_dtype(x), weight)
        if not isinstance(weight, QuantTensor) or library not in TAKES_FP8:
            x, weight = _both_dense(x, weight)
            library = self._library(LINEAR, x.shape[0], x.dtype, weight)
        elif not isinstance(x, QuantTensor):
            x = quantize(x)
        if library == FEW_ROWS:
            return few_rows_linear(x, weight)
        if library != DEEP_GEMM:
            return torch.nn.functional.linear(x, weight)
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=weight.data.device)
        if x.shape[0]:
            self._deep_gemm.fp8_gemm_nt((x.data, x.scale), (weight.data, weight.scale.float()), out)
        return out

    def expand_latent(self, latent, key, kv_up, nope):
        (num_tokens, rope), num_heads = key.shape, kv_up.shape[0]
        keys = torch.empty((num_tokens, num_heads, nope + rope), dtype=latent.dtype, device=latent.device)
        each = latent.expand(num_heads, -1, -1)
        torch.bmm(each, kv_up[:, :nope].transpose(1, 2), out=keys[..., :nope].transpose(0, 1))
        spread_key(key, keys[..., nope:])
        values = torch.empty((num_tokens, num_heads, kv_up.shape[1] - nope), dtype=latent.dtype, device=latent.device)
        torch.bmm(each, kv_up[:, nope:].transpose(1, 2), out=values.transpose(0, 1))
        return keys, values

    def grouped_linear(self, x, weight, layout):
        num_rows, outer = x.shape[0], weight.shape[1]
        assert layout.counts is None or (layout.starts[-1], len(layout.counts)) == (num_rows, weight.shape[0]), (x.shape, layout)
        if not num_rows:
            return torch.empty((0, outer), dtype=dense_dtype(x), device=weight.data.device)
        if isinstance(weight, QuantTensor) and self._library(GROUPED, num_rows, dense_dtype(x), weight) == DEEP_GEMM:
            return self._deep_gemm_contiguous(x, weight, layout)
        x, weight = _both_dense(x, weight)
        if self._library(GROUPED, num_rows, x.dtype, weight) == CUTLASS:
            ends = send(layout.starts[1:], x.device) if layout.ends is None else layout.ends
            return torch.nn.functional.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
        return _triton_contiguous(x, weight, layout)

    def grouped_linear_masked(self, x, weight, counts, expected=None):
        num_experts, capacity, _ = x.shape
        expected = capacity if expected is None else expected
        out = masked_rows(num_experts, capacity, weight.shape[1], dense_dtype(x), weight.data.device)
        if not out.numel():
            return out
        library = self._library(MASKED, capacity, dense_dtype(x), weight)
        if not isinstance(weight, QuantTensor) or library not in TAKES_FP8:
            x, weight = _both_dense(x, weight)
            library = self._library(MASKED, capacity, x.dtype, weight)
        elif not isinstance(x, QuantTensor):
            x = quantize_masked(x, counts)
        if library == FEW_ROWS:
            few_rows_masked(x, weight, counts, out)
        elif library != DEEP_GEMM:
            _triton_masked(x, weight, counts, out)
        elif isinstance(weight, QuantTensor):
            x = whole(x)
            pair = weight.data, weight.scale.float()
            self._deep_gemm.m_grouped_fp8_gemm_nt_masked((x.data, x.scale), pair, whole(out), counts, expected)
        else:
            self._deep_gemm.m_grouped_bf16_gemm_nt_masked(whole(x), weight, whole(out), counts, expected)
        return out

    def _library(self, candidates: tuple[Candidate, ...], rows: int, dtype: torch.dtype, weight: Matrix) -> str:
        """Who does this product."""
        key = id(candidates), rows, dtype, weight.shape, weight.block if isinstance(weight, QuantTensor) else None
        library = self._chosen.get(key)
        if library is None:
            if len(self._chosen) >= _MOST_CHOSEN:
                self._chosen.clear()
            library = choose("product", candidates, Product.of(rows, dtype, weight), self._absent_products).served_by
            self._chosen[key] = library
        return library

    def _deep_gemm_contiguous(self, x: Rows, weight: QuantTensor, layout: ExpertRows) -> torch.Tensor:
        """DeepGEMM wants each expert's rows to start at a multiple of 128; rows in another layout go there and their results come back."""
        device = weight.data.device
        if layout.align != ALIGN_ROWS or layout.experts is None:
            layout = _told(layout)
            padded, here = ExpertRows(layout.counts, ALIGN_ROWS), real_rows(layout)
            there, experts = real_rows(padded), torch.full((padded.starts[-1],), -1, dtype=torch.int32)
            experts[there] = torch.arange(len(layout.counts), dtype=torch.int32).repeat_interleave(torch.tensor(layout.counts))
            dense = dequantize(x, torch.bfloat16) if isinstance(x, QuantTensor) else x
            here, there = here.to(device), there.to(device)
            moved = dense.new_empty(padded.starts[-1], dense.shape[1]).index_copy_(0, there, dense[here])
            result = self._deep_gemm_contiguous(moved, weight, replace(padded, experts=experts.to(device)))
            return result.new_empty(x.shape[0], result.shape[1]).index_copy_(0, here, result[there])
        x = x if isinstance(x, QuantTensor) else quantize(x)
        out = torch.empty((x.shape[0], weight.shape[1]), dtype=torch.bfloat16, device=device)
        pair = weight.data, weight.scale.float()
        self._deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x.data, x.scale), pair, out, layout.experts)
        return out


def dense_dtype(x: Rows) -> torch.dtype:
    """Of the values of x, and so of a product of x."""
    return torch.bfloat16 if isinstance(x, QuantTensor) else x.dtype


def _told(layout: ExpertRows) -> ExpertRows:
    """With counts, rows of gaps included, for those who must know; waits for the device."""
    if layout.counts is not None:
        return layout
    ends = layout.ends.tolist()
    return ExpertRows([end - start for start, end in zip([0, *ends], ends, strict=False)], 1)


def real_rows(layout: ExpertRows) -> torch.Tensor:
    """Places of the rows that are not gaps, `[sum(counts)]` int64 on the host."""
    return torch.cat([torch.arange(first, first + count) for first, count in zip(layout.starts, layout.counts, strict=False)])


def _both_dense(x: Rows, weight: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = dense_dtype(x)
    return tuple(dequantize(side, dtype) if isinstance(side, QuantTensor) else side for side in (x, weight))


def _blocks(rows: int, x: torch.Tensor) -> dict[str, int]:
    """Tile sizes for about `rows` rows an expert."""
    fp32 = x.dtype == torch.float32
    block_m = 16 if rows <= 16 else 32 if rows <= 32 or fp32 else 64 if rows <= 64 else 128
    block_k = 32 if fp32 else 64
    return {"BLOCK_M": block_m, "BLOCK_N": 64 if fp32 else 128, "BLOCK_K": block_k, "EVEN_K": x.shape[-1] % block_k == 0,
            "num_warps": 8 if block_m == 128 else 4, "num_stages": 2 if fp32 else 4}  # fmt: skip


def _triton_contiguous(x: torch.Tensor, weight: torch.Tensor, layout: ExpertRows) -> torch.Tensor:
    layout = _told(layout)
    blocks = _blocks(max(layout.counts), x)
    step, tiles = blocks["BLOCK_M"], []
    for expert, (first, count) in enumerate(zip(layout.starts, layout.counts, strict=False)):
        tiles += [(expert, first + low, min(step, count - low)) for low in range(0, count, step)]
    table = torch.tensor(tiles, dtype=torch.int32).T.contiguous().to(x.device)
    out = torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, None, table, len(tiles), (0, 0), blocks)
    return out


def _triton_masked(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    x = whole(x)
    num_experts, capacity, _ = out.shape
    blocks = _blocks(capacity, x)
    num_tiles = num_experts * cdiv(capacity, blocks["BLOCK_M"])
    _launch(x, weight, out, counts, None, num_tiles, (capacity, x.shape[1]), blocks)


def _launch(x, weight, out, counts, tiles, num_tiles, capacities, blocks) -> None:
    """With `counts` masked, with `tiles` contiguous. `capacities`: rows of an expert, and from one expert's first to the next one's."""
    outer, inner = weight.shape[1:]
    assert x.stride(-1) == 1 and weight.stride(2) == 1 and x.dtype == weight.dtype, (x.stride(), weight.stride())
    grid = (num_tiles, cdiv(outer, blocks["BLOCK_N"]))
    grouped_kernel[grid](
        x, weight, out, counts, tiles, num_tiles, *capacities, inner, outer, x.stride(-2), weight.stride(0), weight.stride(1),
        MASKED=tiles is None, **blocks,
    )  # fmt: skip
