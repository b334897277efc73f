"""Captured work on a CPU: what it asks of kernels and of torch is written down once, and then repeated without the Python around it.

The first call runs the work as always. Meanwhile every call of a kernel is noted with its arguments, and every op of torch with the tensors
that it read and made; these are kept, so that their storage is nobody else's. A repetition goes through the list: calls of kernels in a row
are one call, ops of torch are calls of kernels (`hw.cpu.torch_calls`) or write to the storage that they made first. Views, uninitialised
tensors and constants need no repetition.

Some work cannot be recorded: it reads a value on the host by `int(tensor)` (`tolist` would go unseen), or makes tensors whose shapes depend
on values, or writes to a constant. It is done again each time instead, as is what would keep more memory than `KEPT_BYTES` allows for all
recordings together.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Generic

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hw.api import T
from hw.cpu.native import Kernels
from hw.cpu.torch_calls import calls_of

KEPT_BYTES = 256 << 20
_UNFILLED = {
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}  # fmt: skip
_CONSTANT = {torch.ops.aten.arange, torch.ops.aten.scalar_tensor}  # the same each time, and made to be read


class Recorder:
    """Makes recordings, and knows what they keep together."""

    def __init__(self, kernels: Kernels):
        self.kernels, self.kept_bytes = kernels, 0

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """See `hw.api.Runtime.capture`. Nothing runs before the first call."""
        return Captured(self, work)

    def chain(self, first: Sequence[Callable[[], object]], beside: Sequence[Callable[[], object]]) -> "Chain":
        """See `hw.api.Runtime.chain`."""
        return Chain(self.kernels, first, beside)


class Captured(Generic[T]):
    """Work that repeats itself when it is called."""

    def __init__(self, recorder: Recorder, work: Callable[[], T]):
        self._recorder, self._work = recorder, work
        self._repeatable = True
        self._steps: list[Callable[[], object]] = []
        self._result: T | None = None

    def __call__(self) -> T:
        if not self._repeatable:
            return self._work()
        if not self._steps:
            return self._record()
        for step in self._steps:
            step()
        return self._result

    def calls(self) -> "_Calls | None":
        """What it consists of, if it was recorded and is nothing but calls of kernels."""
        only = self._steps[0] if len(self._steps) == 1 else None
        return only if isinstance(only, _Calls) else None

    def _record(self) -> T:
        recorder, log = self._recorder, _Log(self._recorder.kernels)
        with recorder.kernels.recorded(log.note_call), log:
            result = self._work()
        self._repeatable = log.repeatable and recorder.kept_bytes + log.num_bytes <= KEPT_BYTES
        if self._repeatable:
            recorder.kept_bytes += log.num_bytes
            self._steps, self._result = log.steps(), result
        return result


class _Log(TorchDispatchMode):
    """What runs while this is entered, in order."""

    def __init__(self, kernels: Kernels):
        super().__init__()
        self.kernels, self.repeatable, self.num_bytes = kernels, True, 0
        self._entries: list[list[int] | Callable[[], object]] = []  # words of a call, or what repeats an op
        self._constants: set[int] = set()  # addresses of what is made once
        self._kept: list[object] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and asking to be left out loads the compiler: a second and 100 MB

    def note_call(self, words: list[int]) -> None:
        self._entries.append(words)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode composite ops come as they are called; what they consist of says what they do
            result = op.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = op(*args, **kwargs)
        self.repeatable &= _is_repeatable(op, args, result)
        if not self.repeatable:
            return result
        self._kept.append(result)
        if op._schema.is_mutable:
            self.repeatable &= not any(written.untyped_storage().data_ptr() in self._constants for written in tree_leaves(result))
            self._note_op(op, args, kwargs, result, partial(op, *args, **kwargs))
        elif all(made.alias_info is None for made in op._schema.returns):  # else a view
            self.num_bytes += sum(made.nbytes for made in tree_leaves(result))
            if op.overloadpacket in _CONSTANT:
                self._constants.add(result.untyped_storage().data_ptr())
            elif op.overloadpacket not in _UNFILLED:
                self._note_op(op, args, kwargs, result, _again(op, args, kwargs, result))
        return result

    def _note_op(self, op, args: tuple, kwargs: dict, result: object, again: Callable[[], object]) -> None:
        """again: repeats it, if no kernel does."""
        calls = calls_of(op, args, kwargs, result)
        if calls is None:
            self._entries.append(again)
            return
        self._kept.append(args)
        self._entries += [self.kernels.words(*call) for call in calls]

    def steps(self) -> list[Callable[[], object]]:
        """What to call for a repetition; they own the tensors."""
        found: list[Callable[[], object]] = []
        words: list[int] = []
        num_calls = 0
        for entry in [*self._entries, None]:
            if isinstance(entry, list):
                words, num_calls = words + entry, num_calls + 1
                continue
            if num_calls:
                found.append(_Calls(self.kernels, words, num_calls, self._kept))
                words, num_calls = [], 0
            if entry is not None:
                found.append(entry)
        return found


class _Calls:
    """Calls of kernels in a row."""

    def __init__(self, kernels: Kernels, words: list[int], count: int, kept: list[object]):
        self._words, self._kept = np.array([count, *words], np.uint64), kept
        self.start = self._words.ctypes.data  # of the number of calls, and the words behind it
        self._kernels, self._args = kernels, (self.start + self._words.itemsize, count)

    @classmethod
    def joined(cls, kernels: Kernels, parts: "list[_Calls]") -> "_Calls":
        words = [word for part in parts for word in part._words[1:].tolist()]
        return cls(kernels, words, sum(int(part._words[0]) for part in parts), [part._kept for part in parts])

    def __call__(self) -> None:
        self._kernels.repeat_calls(*self._args)


class Chain:
    """Captured works in a row, the last of them beside the host's own work."""

    def __init__(self, kernels: Kernels, first: Sequence[Callable[[], object]], beside: Sequence[Callable[[], object]]):
        self._kernels, self._parts, self._begun = kernels, (first, beside), 0
        self._joined: list[_Calls | None] = [None, None]  # each part, once it is known to be nothing but calls of kernels
        self._nothing = _Calls(kernels, [], 0, [])

    def __call__(self) -> Callable[[], None]:
        """Those beside run on another thread if they are nothing but calls of kernels and one can be had."""
        first, beside = self._joined
        if first is None:
            first = self._run_each(0)
        if beside is None:
            first()
            self._run_each(1)
        else:
            self._begun = self._kernels.begin_calls(first.start, beside.start, torch.get_num_threads() > 1)
        return self.finish

    def _run_each(self, part: int) -> _Calls:
        """Returns what is left to do of it: nothing."""
        for one in self._parts[part]:
            one()
        calls = [one.calls() if isinstance(one, Captured) else None for one in self._parts[part]]
        if None not in calls:
            self._joined[part] = _Calls.joined(self._kernels, calls)
        return self._nothing

    def finish(self) -> None:
        if self._begun:
            self._kernels.finish_calls(self._begun)
            self._begun = 0

    __del__ = finish  # what is still running reads what is about to go


def _is_repeatable(op, args: tuple, result: object) -> bool:
    """Whether what an op makes is of the same shape each time, and stays off the host."""
    if op is torch.ops.aten.index.Tensor:  # a mask among the indices makes the difference
        return all(one is None or one.dtype is not torch.bool for one in args[1])
    tells_host = not all(isinstance(made, torch.Tensor) for made in tree_leaves(result))
    return not tells_host and torch.Tag.dynamic_output_shape not in op.tags


def _again(op, args: tuple, kwargs: dict, result: object) -> Callable[[], object]:
    """Repeats an op that makes tensors, into those that it made."""
    if op is torch.ops.aten._to_copy.default:
        return partial(result.copy_, args[0])
    into = _writing(op)
    if into is not None:
        overload, names = into
        made = result if isinstance(result, tuple) else (result,)
        return partial(overload, *args, **kwargs, **dict(zip(names, made, strict=True)))

    def compute() -> None:
        for old, new in zip(tree_leaves(result), tree_leaves(op(*args, **kwargs)), strict=True):
            old.copy_(new)

    return compute


@cache
def _writing(op) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """The overload of an op that writes to given tensors, and what these are called; None if there is none."""

    def inputs(overload) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]

    for name in op.overloadpacket.overloads():
        overload = getattr(op.overloadpacket, name)
        outs = tuple(a.name for a in overload._schema.arguments if a.is_out)
        if outs and len(outs) == len(op._schema.returns) and inputs(overload) == inputs(op):
            return overload, outs
    return None
