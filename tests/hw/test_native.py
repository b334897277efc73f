"""Compiling, keeping and loading the CPU kernels, and those for older CPUs than this one. Their results are test_parity's matter."""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hw.api import ExpertRows, Unsupported
from hw.cpu import native
from hw.cpu.native import NoKernels, open_kernels
from hw.cpu.native_ops import NativeOps
from hw.cpu.ops import CpuOps
from hw.quant import dequantize, quantize_weight_blocks
from hw.select import open_backend
from hw.testing import assert_close, tolerance

ONE = """#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void one(long) {}
EXPORT void repeat_calls(const void*, long) {}
EXPORT long begin_calls(const void*, void*, long) { return 0; }
EXPORT void finish_calls(long) {}
"""


@pytest.fixture
def small(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A folder of one kernel, which compiles in no time, and one for what is compiled."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "one.cpp").write_text(ONE)
    monkeypatch.setattr(native, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(native, "_SIGNATURES", {"one": "i"})
    return tmp_path


def test_of_those_who_start_at_once_one_compiles(small, monkeypatch: pytest.MonkeyPatch):
    compiled, together, compile_now = [], threading.Barrier(4), native._compile
    monkeypatch.setattr(native, "_compile", lambda *args: compiled.append(args) or compile_now(*args))

    def start(_):
        together.wait()
        return open_kernels(str(small / "kept"))

    with ThreadPoolExecutor(4) as pool:
        paths = {kernels.path for kernels in pool.map(start, range(4))}
    assert len(paths) == len(compiled) == 1
    assert open_kernels(str(small / "kept")).path in paths and len(compiled) == 1
    (small / "csrc" / "one.cpp").write_text(ONE + "// changed")
    assert open_kernels(str(small / "kept")).path not in paths and len(compiled) == 2
    left = {path.name for path in (small / "kept" / "cpu").iterdir()}
    assert left == {"lock", *(path.name for path in paths), open_kernels(str(small / "kept")).path.name}


def test_why_there_are_none(small, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Said by the log, and by an error if they were asked for."""
    (small / "csrc" / "one.cpp").write_text("this is not C++")
    with pytest.raises(NoKernels, match=r"failed: .*one.cpp:1:1: error"):
        open_kernels(str(small / "kept"))
    (small / "a-file").write_text("")
    with pytest.raises(NoKernels, match="cannot be kept"):
        open_kernels(str(small / "a-file"))
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    reason = r"no C\+\+ compiler is here"
    with caplog.at_level(logging.WARNING):
        assert type(open_backend("cpu").ops) is CpuOps
    assert "no C++ compiler is here" in caplog.text
    with pytest.raises(Unsupported, match=reason):
        open_backend("cpu", cpu_kernels="native")
    monkeypatch.setattr(native.platform, "machine", lambda: "aarch64")
    with pytest.raises(NoKernels, match="this CPU is aarch64"):
        open_kernels()


def test_a_matrix_unit_is_left_to_torch_but_for_few_rows_and_the_invariant_mode():
    w = torch.randn(700, 1000).bfloat16()
    for invariant in (False, True):
        ops = open_backend("cpu", batch_invariant=invariant, cpu_kernels="native").ops
        for dtype, rows in ((torch.bfloat16, 40), (torch.bfloat16, 3), (torch.float32, 40)):
            x, weight = torch.randn(rows, 1000).to(dtype), w.to(dtype)
            ops.kernels.has_amx = False
            by_kernel = ops.linear(x, weight)
            ops.kernels.has_amx = True
            by_torch = not invariant and dtype is torch.bfloat16 and rows == 40
            assert torch.equal(ops.linear(x, weight), x @ weight.T if by_torch else by_kernel)
            grouped = ops.grouped_linear(x, weight[None], ExpertRows([rows]))
            assert torch.equal(grouped, x @ weight.T if by_torch else by_kernel)


def test_threads_serve_callers_at_once_and_a_forked_process():
    ops = open_backend("cpu", cpu_kernels="native").ops
    x, w = torch.randn(40, 64), torch.randn(700, 64)
    expected = ops.linear(x, w)  # by one thread

    def call_often(_) -> bool:
        torch.set_num_threads(3)
        return all(torch.equal(ops.linear(x, w), expected) for _ in range(300))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(call_often, range(2)))
    child = os.fork()
    if child == 0:  # none of the threads is here
        os._exit(0 if call_often(None) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_products_on_an_older_cpu(dtype: torch.dtype):
    ops = NativeOps(open_kernels(target="AVX2"))
    for num_rows, inner, outer in ((1, 16, 19), (7, 23, 5), (33, 130, 33), (3, 1536, 40)):
        x, w = torch.randn(num_rows, inner).to(dtype), (torch.randn(outer, inner) * inner**-0.5).to(dtype)
        assert_close(ops.linear(x, w), CpuOps().linear(x, w), tolerance(dtype), f"linear {num_rows, inner, outer}")
        heads, per_head = torch.randn(num_rows, 3, inner).to(dtype), (torch.randn(3, inner, outer) * inner**-0.5).to(dtype)
        assert_close(ops.head_matmul(heads, per_head), CpuOps().head_matmul(heads, per_head), tolerance(dtype), "head_matmul")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("target", native.TARGETS)
def test_weights_in_fp8_give_the_bits_of_dequantised_ones(target: str, dtype: torch.dtype):
    try:
        ops = NativeOps(open_kernels(target=target))
    except NoKernels as error:
        pytest.skip(str(error))
    for num_rows, inner, outer in ((1, 512, 19), (3, 200, 130), (30, 1536, 40)):
        w = torch.randn(2, outer, inner) * torch.logspace(-6, 3, inner)  # in a block of columns some have no exponent left
        quant, x = quantize_weight_blocks(w, (16, 128)), torch.randn(num_rows, inner).to(dtype)
        dense, layout = dequantize(quant, dtype), ExpertRows([num_rows - num_rows // 2, num_rows // 2])
        assert (quant.data.float().abs() < 2**-6).any()
        assert torch.equal(ops.linear(x, quant.expert(1)), ops.linear(x, dense[1]))
        assert torch.equal(ops.grouped_linear(x, quant, layout), ops.grouped_linear(x, dense, layout))
