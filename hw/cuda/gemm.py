"""Matrix products: cuBLAS and CUTLASS for bf16 and fp32, DeepGEMM for fp8 and for large masked groups, Triton for what is left.

FP8 weights meet bf16 activations that are quantised per token in groups of 128 on the way in (`quantize_kernel`), where the shape fits:
blocks of 128 x 128, K a multiple of 128, N of 64. Other shapes, and fp32 activations, take the declared composite: dequantise, then
the product in the model dtype.
"""

from types import ModuleType

import torch
import triton

from hw.api import Matrix
from hw.cuda.layout import ALIGN_ROWS, masked_rows, whole
from hw.cuda.rules import CUTLASS, DEEP_GEMM, GROUPED, LINEAR, MASKED
from hw.cuda.triton_grouped import grouped_kernel, quantize_kernel
from hw.quant import QuantTensor, dequantize
from hw.rules import Candidate, Product, choose

_GROUPS = 8  # of 128 channels in one quantising program


class GemmOps:
    """See `hw.api.Ops`. `deep_gemm`: the library, or None to run every shape on the composites."""

    def __init__(self, deep_gemm: ModuleType | None):
        self._deep_gemm = deep_gemm
        self._absent_products = frozenset({DEEP_GEMM}) if deep_gemm is None else frozenset()

    def linear(self, x, weight):
        if not isinstance(weight, QuantTensor):
            return torch.nn.functional.linear(x, weight)
        if self._library(LINEAR, x, weight) != DEEP_GEMM:
            return torch.nn.functional.linear(x, dequantize(weight, x.dtype))
        out = torch.empty((x.shape[0], weight.data.shape[0]), dtype=x.dtype, device=x.device)
        if x.shape[0]:
            self._deep_gemm.fp8_gemm_nt(quantize(x), (weight.data, weight.scale.float()), out)
        return out

    def head_matmul(self, x, weight):
        out = torch.empty((x.shape[0], x.shape[1], weight.shape[2]), dtype=x.dtype, device=x.device)
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return out

    def grouped_linear(self, x, weight, counts):
        data = weight.data if isinstance(weight, QuantTensor) else weight
        num_rows, outer = x.shape[0], data.shape[1]
        assert num_rows == sum(counts) and len(counts) == data.shape[0], (num_rows, sum(counts), len(counts), data.shape)
        if not num_rows:
            return torch.empty((0, outer), dtype=x.dtype, device=x.device)
        if isinstance(weight, QuantTensor):
            if self._library(GROUPED, x, weight) == DEEP_GEMM:
                return self._deep_gemm_contiguous(x, weight, counts)
            weight = dequantize(weight, x.dtype)
        if self._library(GROUPED, x, weight) == CUTLASS:
            ends = torch.tensor(counts).cumsum(0).int().to(x.device)
            return torch.nn.functional.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
        return _triton_contiguous(x, weight, counts)

    def grouped_linear_masked(self, x, weight, counts):
        num_experts, capacity = x.shape[:2]
        outer = weight.data.shape[1] if isinstance(weight, QuantTensor) else weight.shape[1]
        out = masked_rows(num_experts, capacity, outer, x)
        if not out.numel():
            return out
        if isinstance(weight, QuantTensor):
            if self._library(MASKED, x, weight) == DEEP_GEMM:
                pair = weight.data, weight.scale.float()
                self._deep_gemm.m_grouped_fp8_gemm_nt_masked(quantize_masked(x, counts), pair, whole(out), counts.int(), capacity)
                return out
            weight = dequantize(weight, x.dtype)
        if self._library(MASKED, x, weight) == DEEP_GEMM:
            self._deep_gemm.m_grouped_bf16_gemm_nt_masked(whole(x), weight, whole(out), counts.int(), capacity)
            return out
        _triton_masked(x, weight, counts, out)
        return out

    def _library(self, candidates: tuple[Candidate, ...], x: torch.Tensor, weight: Matrix) -> str:
        """Who does this product."""
        return choose("product", candidates, Product.of(x.shape[-2], x.dtype, weight), self._absent_products).library

    def _deep_gemm_contiguous(self, x: torch.Tensor, weight: QuantTensor, counts: list[int]) -> torch.Tensor:
        """Quantising moves each expert's rows to a multiple of 128, where DeepGEMM wants them; the results come back together.

        rows       | expert 0 | expert 1 | ...            padded     | expert 0 | - | expert 1 | - | ...     - : expert -1
        """
        experts = torch.arange(len(counts), dtype=torch.int32)
        lens = torch.tensor(counts)
        padded = (lens + ALIGN_ROWS - 1) // ALIGN_ROWS * ALIGN_ROWS
        shift = (padded.cumsum(0) - padded) - (lens.cumsum(0) - lens)
        rows = torch.arange(x.shape[0]) + shift.repeat_interleave(lens)
        layout = torch.full((int(padded.sum()),), -1, dtype=torch.int32)
        layout[rows] = experts.repeat_interleave(lens)
        rows, layout = rows.to(x.device), layout.to(x.device)
        out = torch.empty((layout.shape[0], weight.data.shape[1]), dtype=x.dtype, device=x.device)
        pair = quantize(x, rows, layout.shape[0])
        self._deep_gemm.m_grouped_fp8_gemm_nt_contiguous(pair, (weight.data, weight.scale.float()), out, layout)
        return out[rows]


def quantize(x: torch.Tensor, rows: torch.Tensor | None = None, num_rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[T, K]` -> e4m3 `[num_rows, K]` and its scales `[num_rows, K / 128]`, column-major. Row i goes to row `rows[i]`, if given."""
    data, scale = _quantize(x[None], rows, None, x.shape[0] if num_rows is None else num_rows)
    return data[0], scale[0]


def quantize_masked(x: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[E, capacity, K]`, of which the first `counts[e]` rows are real -> e4m3 `[E, aligned capacity, K]` and scales."""
    return _quantize(x, None, counts, -(-x.shape[1] // ALIGN_ROWS) * ALIGN_ROWS)


def _quantize(x: torch.Tensor, rows: torch.Tensor | None, counts: torch.Tensor | None, data_rows: int):
    num_experts, capacity, inner = x.shape
    assert x.stride(2) == 1 and inner % 128 == 0, (x.stride(), inner)
    num_groups = inner // 128
    stride = -(-data_rows // 4) * 4  # a column of scales starts at 16 bytes
    data = torch.empty((num_experts, data_rows, inner), dtype=torch.float8_e4m3fn, device=x.device)
    columns = torch.empty((num_experts, num_groups, stride), device=x.device)
    quantize_kernel[(num_experts * capacity, triton.cdiv(num_groups, _GROUPS))](
        x, rows, counts, data, columns, x.stride(0), x.stride(1), capacity, data_rows, stride, num_groups,
        HAS_ROWS=rows is not None, HAS_COUNTS=counts is not None, GROUPS=_GROUPS,
    )  # fmt: skip
    return data, columns.transpose(1, 2)[:, :data_rows]


def _blocks(rows: int, x: torch.Tensor) -> dict[str, int]:
    """Tile sizes for about `rows` rows an expert."""
    fp32 = x.dtype == torch.float32
    block_m = 16 if rows <= 16 else 32 if rows <= 32 or fp32 else 64 if rows <= 64 else 128
    block_k = 32 if fp32 else 64
    return {"BLOCK_M": block_m, "BLOCK_N": 64 if fp32 else 128, "BLOCK_K": block_k, "EVEN_K": x.shape[-1] % block_k == 0,
            "num_warps": 8 if block_m == 128 else 4, "num_stages": 2 if fp32 else 4}  # fmt: skip


def _triton_contiguous(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    blocks = _blocks(max(counts), x)
    step, first, tiles = blocks["BLOCK_M"], 0, []
    for expert, count in enumerate(counts):
        tiles += [(expert, first + low, min(step, count - low)) for low in range(0, count, step)]
        first += count
    table = torch.tensor(tiles, dtype=torch.int32).T.contiguous().to(x.device)
    out = torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, None, table, len(tiles), (0, 0), blocks)
    return out


def _triton_masked(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    x = whole(x)
    num_experts, capacity, _ = out.shape
    blocks = _blocks(capacity, x)
    num_tiles = num_experts * triton.cdiv(capacity, blocks["BLOCK_M"])
    _launch(x, weight, out, counts, None, num_tiles, (capacity, x.shape[1]), blocks)


def _launch(x, weight, out, counts, tiles, num_tiles, capacities, blocks) -> None:
    """With `counts` masked, with `tiles` contiguous. `capacities`: rows of an expert, and from one expert's first to the next one's."""
    outer, inner = weight.shape[1:]
    assert x.stride(-1) == 1 and weight.stride(2) == 1 and x.dtype == weight.dtype, (x.stride(), weight.stride())
    grid = (num_tiles, triton.cdiv(outer, blocks["BLOCK_N"]))
    grouped_kernel[grid](
        x, weight, out, counts, tiles, num_tiles, *capacities, inner, outer, x.stride(-2), weight.stride(0), weight.stride(1),
        MASKED=tiles is None, **blocks,
    )  # fmt: skip
