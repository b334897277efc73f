"""Every backend this machine has against the plain reference, op by op, on the named grids of `hw.testing`.

The kernel always runs before its twin, so that memory it forgot to write cannot hold the right answer by chance."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hw import testing
from hw.api import Ops
from hw.cpu.reference.ops import ReferenceOps
from hw.quant import QuantTensor
from hw.select import open_backend
from hw.testing import assert_close, tolerance
from tests.hw.op_calls import TABLE, WITHOUT_NUMBERS, Call, skips

DTYPES = (torch.float32, torch.bfloat16)


def test_no_op_of_the_contract_is_left_out():
    assert set(TABLE) | WITHOUT_NUMBERS == {name for name, member in vars(Ops).items() if callable(member) and not name.startswith("_")}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything inside tuples, lists and dataclasses, with the way there.

    Quantised rows differ by a step where a sum in front of them was rounded otherwise, so their scales are compared as what was rounded.
    """
    if isinstance(value, QuantTensor):
        value = {"data": value.data, "scale": value.scale.bfloat16(), "block": value.block}
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield path, value
        return
    for name, part in value.items():
        yield from leaves(part, f"{path}.{name}" if path else str(name))


def compare(actual: Any, expected: Any, what: str, exact: bool = False) -> None:
    pairs = zip(leaves(actual), leaves(expected), strict=True)
    for (place, a), (_, e) in pairs:
        if not isinstance(e, torch.Tensor):
            assert a == e, f"{what} {place}: {a!r}, expected {e!r}"
            continue
        assert a.dtype == e.dtype, f"{what} {place}: {a.dtype}, expected {e.dtype}"
        assert_close(a.float() if e.dtype.itemsize == 1 else a, e.float() if e.dtype.itemsize == 1 else e,
                     (0.0, 0.0) if exact else tolerance(e.dtype), f"{what} {place}")  # fmt: skip


def to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        # The whole storage, so that a view arrives as the same view.
        storage = value.as_strided((value.untyped_storage().nbytes() // value.dtype.itemsize,), (1,), 0)
        return storage.to(device, copy=True).as_strided(value.shape, value.stride(), value.storage_offset())
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(
            value, **{field.name: to_device(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        )
    return copy.copy(value)


def check(ops: Ops, op: str, name: str, call: Call, device: torch.device) -> None:
    args = tuple(to_device(arg, device) for arg in call.args)
    actual = getattr(ops, op)(*args)
    twin_args = tuple(to_device(arg, torch.device("cpu")) for arg in call.args)
    expected = getattr(ReferenceOps(), op)(*twin_args)
    compare(call.real(actual), call.real(expected), f"{op} {name}")
    for i, arg in enumerate(args):
        if i in call.changes:
            compare(arg, twin_args[i], f"{op} {name} argument {i}, changed in place,")
        else:
            compare(arg, call.args[i], f"{op} {name} argument {i}, not to be changed,", exact=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", TABLE)
@pytest.mark.parametrize("variant", testing.variants())
def test_parity(variant: str, op: str, dtype: torch.dtype):
    if skips(op, dtype):
        return
    opened = open_backend(**testing.variants()[variant])
    for name, call in TABLE[op](dtype):
        check(opened.ops, op, name, call, opened.runtime.device)


@pytest.mark.parametrize("tile", [1, 50, 4000])
@pytest.mark.parametrize("op", ["mla_decode", "mla_prefill"])
def test_cpu_attention_in_tiles_of_scores(op: str, tile: int, monkeypatch: pytest.MonkeyPatch):
    """Contexts longer than a score tile, without the memory that the real tile would take."""
    monkeypatch.setattr("hw.cpu.ops._SCORE_TILE", tile)
    monkeypatch.setattr("hw.cpu.invariant._ROWS", 3)
    for invariant in (False, True):
        opened = open_backend("cpu", batch_invariant=invariant, cpu_kernels="torch")
        for name, call in TABLE[op](torch.float32):
            check(opened.ops, op, name, call, opened.runtime.device)


def test_the_harness_sees_a_wrong_result_and_a_changed_input():
    class Wrong(ReferenceOps):
        def silu_mul(self, gate_up):
            return super().silu_mul(gate_up) + 1e-3

        def linear(self, x, weight):
            result = super().linear(x, weight)
            x.mul_(2.0)
            return result

        def latent_write(self, down, q_norm, kv_norm, eps, positions, table, cache, slots, quant=False):
            return super().latent_write(down, q_norm, kv_norm, eps, positions, table, cache, slots.clamp(min=0), quant)

    for op, message in (("silu_mul", "silu_mul one-row"), ("linear", "argument 0, not to be"), ("latent_write", "argument 6, changed")):
        with pytest.raises(AssertionError, match=message):
            for name, call in TABLE[op](torch.float32):
                check(Wrong(), op, name, call, torch.device("cpu"))
