"""Ops of torch that are calls of kernels in a repetition: copies of rows, under whatever name, and two more. Torch takes some microseconds
to find out what it is to do, each time, for what is done in a fraction of one.
"""

from collections.abc import Callable
from typing import Any

import torch

Call = tuple[str, tuple]  # name and arguments of a kernel


def calls_of(op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], result: object) -> list[Call] | None:
    """Calls that do what an op of torch did, with its arguments and to its result; None: there are none."""
    found = _KNOWN.get(op)
    return None if found is None else found(*args, **kwargs, result=result)


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False, *, result: torch.Tensor) -> list[Call] | None:
    if to.shape != source.shape:
        return None
    if to.is_contiguous() and source.is_contiguous():
        if (source.dtype, to.dtype) == (torch.bfloat16, torch.float32):
            return [("widen", (source.data_ptr(), to.data_ptr(), to.numel()))]
        return [_rows(to, source, 0, 0, 1, to.nbytes)] if to.dtype is source.dtype else None
    if to.dtype is not source.dtype or _inner_bytes(to) is None or _inner_bytes(source) is None:
        return None
    return [_rows(to, source, _step(to), _step(source), to.shape[0], _inner_bytes(to))]


def _convert(source: torch.Tensor, *, result: torch.Tensor, **_) -> list[Call] | None:
    return _copy(result, source, result=result)


def _pick(source: torch.Tensor, indices: list, *, result: torch.Tensor) -> list[Call] | None:
    idx, num_bytes = indices[0], _inner_bytes(source)
    if len(indices) > 1 or not _is_index(idx) or num_bytes is None or not result.is_contiguous():
        return None
    return [_rows(result, source, num_bytes, _step(source), len(idx), num_bytes, source_idx=idx)]


def _select(source: torch.Tensor, dim: int, idx: torch.Tensor, *, result: torch.Tensor) -> list[Call] | None:
    return None if dim else _pick(source, [idx], result=result)


def _put(to: torch.Tensor, indices: list, values: torch.Tensor, accumulate: bool = False, *, result: torch.Tensor) -> list[Call] | None:
    idx, num_bytes = indices[0], _inner_bytes(to)
    if len(indices) > 1 or accumulate or not _is_index(idx) or num_bytes is None or values.dtype is not to.dtype:
        return None
    if values.nbytes != len(idx) * num_bytes or not values.is_contiguous():  # of one row it comes without that dimension
        return None
    return [_rows(to, values, _step(to), num_bytes, len(idx), num_bytes, to_idx=idx)]


def _join(parts: list[torch.Tensor], dim: int = 0, *, result: torch.Tensor) -> list[Call] | None:
    if result.ndim != 2 or dim not in (1, -1) or any(p.ndim != 2 or p.stride(1) != 1 or p.dtype is not result.dtype for p in parts):
        return None
    columns = result.split([part.shape[1] for part in parts], dim=1)
    return [_rows(c, p, _step(c), _step(p), p.shape[0], p.shape[1] * p.itemsize) for c, p in zip(columns, parts, strict=True)]


def _add(x: torch.Tensor, value: object, *, result: torch.Tensor, alpha: int = 1) -> list[Call] | None:
    if not isinstance(value, int) or alpha != 1 or x.dtype is not torch.int64 or not x.is_contiguous() or not result.is_contiguous():
        return None
    return [("add_int", (x.data_ptr(), value, result.data_ptr(), x.numel()))]


def _rows(
    to: torch.Tensor, source: torch.Tensor, to_step: int, source_step: int, count: int, num_bytes: int,
    to_idx: torch.Tensor | None = None, source_idx: torch.Tensor | None = None,
) -> Call:  # fmt: skip
    """Steps in bytes."""

    def place(idx: torch.Tensor | None, indexed: torch.Tensor) -> tuple:
        return (None, 0) if idx is None else (idx.data_ptr(), indexed.shape[0])

    ends = to.data_ptr(), to_step, *place(to_idx, to), source.data_ptr(), source_step, *place(source_idx, source)
    return "copy_rows", (*ends, count, num_bytes)


def _is_index(idx: torch.Tensor | None) -> bool:
    return idx is not None and idx.dtype is torch.int64 and idx.ndim == 1 and idx.is_contiguous()


def _step(x: torch.Tensor) -> int:
    return x.stride(0) * x.itemsize


def _inner_bytes(x: torch.Tensor) -> int | None:
    """Bytes of x[i], None where they do not lie side by side."""
    num = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and stride != num:
            return None
        num *= size
    return num * x.itemsize if x.ndim else None


_aten = torch.ops.aten
_KNOWN: dict[torch._ops.OpOverload, Callable[..., list[Call] | None]] = {
    _aten.copy_.default: _copy,
    _aten._to_copy.default: _convert,
    _aten.index.Tensor: _pick,
    _aten.index_select.default: _select,
    _aten.index_put_.default: _put,
    _aten.cat.default: _join,
    _aten.add.Tensor: _add,
}
