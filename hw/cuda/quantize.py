"""FP8 quantisation of activations, on its own or at the end of another pass over rows."""

import torch

from hw.cuda.launch import cdiv
from hw.cuda.layout import GROUP, quantized_masked_rows, quantized_rows
from hw.cuda.triton_quantize import quantize_kernel
from hw.quant import QuantTensor

_GROUPS = 16  # of 128 channels in one program: 16 values a thread, one store of e4m3


def quantize(x: torch.Tensor) -> QuantTensor:
    """x `[T, K]`, K a multiple of 128, rows may be strided."""
    out = quantized_rows(*x.shape, x.device)
    _launch(x[None], None, out.data[None], out.scale[None])
    return out


def quantize_masked(x: torch.Tensor, counts: torch.Tensor) -> QuantTensor:
    """x `[E, capacity, K]`, of which the first `counts[e]` rows are real, in the masked layout."""
    out = quantized_masked_rows(*x.shape, x.device)
    _launch(x, counts, out.data, out.scale)
    return out


def _launch(x: torch.Tensor, counts: torch.Tensor | None, data: torch.Tensor, scale: torch.Tensor) -> None:
    num_experts, capacity, inner = x.shape
    assert x.stride(2) == 1 and inner % GROUP == 0, (x.stride(), inner)
    if not x.numel():
        return
    num_groups = inner // GROUP
    quantize_kernel[(num_experts * capacity, cdiv(num_groups, _GROUPS))](
        x, counts, data, scale, x.stride(0), x.stride(1), capacity, data.stride(0) // inner, scale.stride(2), num_groups,
        HAS_COUNTS=counts is not None, GROUPS=_GROUPS,
    )  # fmt: skip
