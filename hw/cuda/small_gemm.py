"""Products of few rows: how the kernels of `hw.cuda.triton_small_gemm` are cut. Sizes are those that an H200 liked best."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from hw.cuda.launch import cdiv, power_of_2
from hw.cuda.rules import WARPS_CUT_K_MOST_ROWS
from hw.cuda.triton_small_gemm import few_rows_kernel, row_kernel, split_k_kernel, sum_splits_kernel
from hw.quant import QuantTensor

_PROGRAMS = 528  # of the kernel whose programs cut K: four a multiprocessor
_LEAST_BLOCKS = 4  # of 128 channels in one of its splits


def few_rows_linear(x: torch.Tensor | QuantTensor, weight: torch.Tensor | QuantTensor) -> torch.Tensor:
    """`x @ weight.T`, `[T, N]` bf16: x `[T, K]`, at most 16 rows, weight `[N, K]`, both FP8 or both dense.

    FP8 rows are best as `hw.cuda.layout.quantized_rows` lays them.
    """
    num_rows = x.shape[0]
    out = torch.empty((num_rows, weight.shape[0]), dtype=torch.bfloat16, device=weight.data.device)
    if not isinstance(x, QuantTensor):
        if num_rows == 1:
            row_by_row(x, weight, out, block_n=4)
        else:
            _warps_cut_k(x.contiguous()[None], None, weight[None], None, out[None], None)
    elif num_rows <= WARPS_CUT_K_MOST_ROWS:
        _warps_cut_k(x.data[None], x.scale[None], weight.data[None], weight.scale.float()[None], out[None], None)
    else:
        _programs_cut_k(x, weight, out)
    return out


def row_by_row(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, block_n: int) -> None:
    """Write `x @ weight.T` to `out`, with sums in fp32: x `[T, K]`, weight `[N, K]`, K at most `MOST_AT_ONCE`, out `[T, N]`."""
    num_rows, (outer, inner) = x.shape[0], weight.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous(), (x.stride(), weight.stride(), out.stride())
    row_kernel[(cdiv(outer, block_n), num_rows)](
        x, weight, out, outer, inner, x.stride(0), BLOCK_N=block_n, BLOCK_K=power_of_2(inner), num_warps=8
    )  # fmt: skip


def few_rows_masked(x: torch.Tensor | QuantTensor, weight: torch.Tensor | QuantTensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    """Write to `out` the product of each expert's first `counts[e]` rows; layouts as in `hw.cuda.layout`, both sides FP8 or both dense."""
    if isinstance(x, QuantTensor):
        _warps_cut_k(x.data, x.scale, weight.data, weight.scale.float(), out, counts)
    else:
        x = x if _rows_follow(x) else x.contiguous()
        _warps_cut_k(x, None, weight, None, out, counts)


def _warps_cut_k(x, x_scale, weight, weight_scale, out, counts) -> None:
    num_experts, capacity, outer = out.shape
    inner = x.shape[2]
    if not out.numel():
        return
    assert _rows_follow(x) and _rows_follow(out) and weight.is_contiguous(), (x.stride(), out.stride(), weight.stride())
    fp8 = x_scale is not None
    if fp8 and capacity > 1 and x_scale.stride(1) != 1:
        x_scale = x_scale.mT.contiguous().mT
    split, block_n, block_t, block_k, num_stages = _tile(fp8, counts is not None, capacity, inner)
    grid = (cdiv(outer, block_n), cdiv(capacity, block_t), num_experts)
    few_rows_kernel[grid](
        x, x_scale, weight, weight_scale, out, counts, capacity, outer, inner, x.stride(0), x_scale.stride(0) if fp8 else 0,
        x_scale.stride(2) if fp8 else 0, out.stride(0),
        MASKED=counts is not None, SCALED=fp8, EVEN=inner % (split * block_k) == 0, SPLIT=split, BLOCK_N=block_n, BLOCK_T=block_t,
        BLOCK_K=block_k, num_warps=split, num_stages=num_stages,
    )  # fmt: skip


def _tile(fp8: bool, masked: bool, num_rows: int, inner: int) -> tuple[int, int, int, int, int]:
    """Warps, their weight rows, rows and channels at a time, and stages."""
    block_t = min(16, power_of_2(num_rows))
    if fp8:
        return 4 if masked or inner < 4096 else 8, 16 if block_t <= 4 else 32, block_t, 128, 3
    if not masked:
        return 4, 16, block_t, 128, 3
    if block_t == 1:
        return (4, 16, 1, 128, 3) if inner % 512 == 0 else (2, 16, 1, 64, 4)
    return (2, 32, 16, 64, 6) if block_t == 16 else (4, 32, 8, 64, 3)


def _rows_follow(x: torch.Tensor) -> bool:
    """Whether an expert's rows in `[E, T, K]` lie one after the other."""
    return x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])


def _programs_cut_k(x: QuantTensor, weight: QuantTensor, out: torch.Tensor) -> None:
    num_rows, (outer, inner) = x.shape[0], weight.shape
    block_n, num_blocks = 64, inner // 128
    tiles = cdiv(outer, block_n)
    wanted = max(1, min(round(_PROGRAMS / tiles), num_blocks // _LEAST_BLOCKS))
    blocks_per_split = cdiv(num_blocks, wanted)
    num_splits = cdiv(num_blocks, blocks_per_split)
    part = out if num_splits == 1 else torch.empty((num_splits, num_rows, outer), device=out.device)
    x_scale = x.scale if x.scale.stride(0) == 1 else x.scale.T.contiguous().T
    split_k_kernel[(tiles, 1, num_splits)](
        x.data, x_scale, TensorDescriptor.from_tensor(weight.data, [block_n, 128]), weight.scale.float(), part, num_rows, outer, inner,
        x_scale.stride(1), blocks_per_split, BLOCK_N=block_n, BLOCK_T=16, num_warps=4, num_stages=4,
    )  # fmt: skip
    if num_splits > 1:
        sum_splits(part, out)


def sum_splits(part: torch.Tensor, out: torch.Tensor) -> None:
    """`out[...] = part.sum(0)` in the order of the splits: part `[splits, ...]` fp32, both contiguous."""
    num_splits, size = part.shape[0], out.numel()
    sum_splits_kernel[(cdiv(size, 256),)](
        part, out, size, num_splits, SPLITS=power_of_2(num_splits), BLOCK=256, num_warps=2
    )  # fmt: skip
