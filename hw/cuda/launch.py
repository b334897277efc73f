"""Launching Triton kernels at less cost to the host than Triton's own way.

At each launch Triton works out anew which of a kernel's compiled forms the arguments take; that, not the launch, takes most of the time,
and a step that is not captured has hundreds of launches. `launched` finds the form by a key of its own, which tells apart whatever Triton
does. The two sizes below are plain functions because Triton's are callables of its language, several times as slow.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel


class Launched:
    """A kernel for `kernel[grid](*tensors and numbers, **constexprs and options)`; no tensor descriptors."""

    def __init__(self, kernel: triton.JITFunction):
        self.kernel, self.arg_names, self.__name__ = kernel, kernel.arg_names, kernel.__name__
        # By what the arguments are: the compiled form, and the constexprs that follow on them.
        self._forms: dict[tuple, tuple[CompiledKernel, tuple]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        key = (device, *named.items(), *map(_kind, args))
        form = self._forms.get(key)
        if form is None:
            compiled = self.kernel[grid](*args, **named)
            if isinstance(compiled, CompiledKernel):  # not if it is interpreted
                self._forms[key] = compiled, tuple(named[name] for name in self.arg_names[len(args) :])
            return
        compiled, consts = form
        stream = torch._C._cuda_getCurrentRawStream(device)
        grid = (*grid, 1, 1)[:3]
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *consts)


def _kind(arg: Any) -> Any:
    """What Triton compiles a form of its own for: dtype and alignment of tensors; size, alignment and oneness of integers."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if type(arg) is int:
        return arg == 1, arg % 16 == 0, -(1 << 31) <= arg < 1 << 31
    assert arg is None or type(arg) is float, type(arg)
    return type(arg)


def launched(kernel: triton.JITFunction) -> Launched:
    """To decorate what `triton.jit` made."""
    return Launched(kernel)


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The smallest that is at least x, at least 1."""
    return 1 << max(0, x - 1).bit_length()
