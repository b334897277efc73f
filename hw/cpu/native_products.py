"""Products by the kernels of `csrc/products.cpp`. A mixin over ops in torch, which do whatever these do not take."""

import torch

from hw.api import ExpertRows, Matrix, Rows
from hw.cpu.native import Kernels
from hw.quant import QuantTensor


def takes(*tensors: torch.Tensor | QuantTensor) -> bool:
    """Dense, of one dtype that the kernels know, values of a row side by side."""
    if isinstance(tensors[0], QuantTensor):
        return False
    dtype = tensors[0].dtype
    if dtype is not torch.bfloat16 and dtype is not torch.float32:
        return False
    for tensor in tensors:  # noqa: SIM110  asked before every call of a kernel, and a loop takes a third of the time
        if isinstance(tensor, QuantTensor) or tensor.dtype is not dtype or tensor.stride(-1) != 1:
            return False
    return True


def _takes_weight(x: Rows, weight: Matrix) -> bool:
    """Also of block-FP8, which becomes the dtype of x on its way."""
    if not isinstance(weight, QuantTensor):
        return takes(x, weight)
    return takes(x) and weight.data.stride(-1) == 1 and weight.scale.dtype is torch.float32


class NativeProducts:
    """See `hw.api.Ops`. Weights are read as they lie in memory, so whoever fills or moves them need not know of the kernels.

    A row's result does not depend on the other rows, whichever mode the ops below are for.
    """

    kernels: Kernels

    def left_to_torch(self, dtype: torch.dtype, rows: int) -> bool:
        """Whether torch multiplies so many rows faster: with a matrix unit by up to 14 times, from about 8 rows on (bench/cpu_products).
        Its bits depend on the number of rows, so never in the invariant mode.
        """
        return self.kernels.has_amx and self.rows_by_library and dtype is torch.bfloat16 and rows >= 8

    def linear(self, x: Rows, weight):
        if not _takes_weight(x, weight) or self.left_to_torch(x.dtype, x.shape[0]):
            return super().linear(x, weight)
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
        self._product(x, weight, out, rows=x.shape[0])
        return out

    def head_matmul(self, x, weight):
        by_inner = weight.stride(2) == 1  # [H, K, N]; else a view of [H, N, K]
        stored = weight if by_inner else weight.transpose(1, 2)
        if not takes(x, stored):
            return super().head_matmul(x, weight)
        out = torch.empty(*x.shape[:2], weight.shape[2], dtype=x.dtype)
        self._heads(x, stored, out, by_inner=by_inner)
        return out

    def grouped_linear(self, x: Rows, weight, layout: ExpertRows):
        if not _takes_weight(x, weight) or self.left_to_torch(x.dtype, x.shape[0] // weight.shape[0]):
            return super().grouped_linear(x, weight, layout)
        out = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
        starts, counts = torch.tensor(layout.starts, dtype=torch.int64), torch.tensor(layout.counts, dtype=torch.int32)
        self._product(x, weight, out, starts=starts, counts=counts)
        return out

    def grouped_linear_masked(self, x: Rows, weight, counts, expected=None):
        if not _takes_weight(x, weight):
            return super().grouped_linear_masked(x, weight, counts, expected)
        out = torch.empty(*x.shape[:2], weight.shape[1], dtype=x.dtype)
        self._product(x, weight, out, counts=counts.int(), x_step=x.stride(0), out_step=out.stride(0))
        return out

    def _product(self, x, weight, out, *, rows: int = 0, starts=None, counts=None, x_step: int = 0, out_step: int = 0) -> None:
        """One weight `[N, K]` for `rows` rows, or `[E, N, K]` for counts[e] rows from starts[e] on, or from e * step."""
        scales: tuple[int | None, ...] = (None, 0, 0, 1, 1)
        if isinstance(weight, QuantTensor):
            scale, block, weight = weight.scale.contiguous(), weight.block, weight.data
            scales = (scale.data_ptr(), scale.stride(-2), scale.stride(0) if scale.ndim == 3 else 0, *block)
        grouped = weight.ndim == 3
        num_groups, w_step = (weight.shape[0], weight.stride(0)) if grouped else (1, 0)
        self.kernels.product(
            x.dtype is torch.bfloat16, x.data_ptr(), x.stride(-2), weight.data_ptr(), weight.stride(-2), out.data_ptr(), out.stride(-2),
            num_groups, None if starts is None else starts.data_ptr(), None if counts is None else counts.data_ptr(), rows, x_step, w_step,
            out_step, weight.shape[-2], weight.shape[-1], False, *scales, torch.get_num_threads(),
        )  # fmt: skip

    def _heads(self, x, weight, out, *, by_inner: bool) -> None:
        """x `[T, H, K]` or `[T, K]` for all heads, weight `[H, N, K]`, or `[H, K, N]` if by_inner, out `[T, H, N]`; any may be a view."""
        num_heads, outer, inner = weight.shape
        if by_inner:
            outer, inner = inner, outer
        x_step = x.stride(1) if x.ndim == 3 else 0
        self.kernels.product(
            x.dtype is torch.bfloat16, x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(1), out.data_ptr(), out.stride(0),
            num_heads, None, None, x.shape[0], x_step, weight.stride(0), out.stride(1), outer, inner, by_inner,
            None, 0, 0, 1, 1, torch.get_num_threads(),
        )  # fmt: skip
