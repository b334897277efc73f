"""A head in 8 bits against the same sums in torch, and how far it is from the head itself."""

import pytest
import torch

from hw.cpu.guess_head import NativeGuessHead
from hw.cpu.native import TARGETS, cpu_flags, open_kernels
from hw.cpu.recording import Recorder
from hw.cpu.runtime import CpuRuntime


@pytest.fixture(scope="module", params=[target for target, (needed, _) in TARGETS.items() if needed <= cpu_flags()])
def kernels(request: pytest.FixtureRequest):
    return open_kernels(target=request.param)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row in steps of a 127th of its largest value."""
    scale = x.abs().amax(1, keepdim=True).clamp(min=2.0**-100) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, vocab, hidden", [(1, 4096, 256), (3, 100, 50), (2, 64, 4), (5, 1, 1), (2, 5001, 130)])
def test_sums_are_those_of_rounded_values(kernels, dtype, rows, vocab, hidden, monkeypatch):
    weight, x = torch.randn(vocab, hidden).to(dtype), torch.randn(rows, hidden).to(dtype)
    head = NativeGuessHead(kernels, CpuRuntime().empty, weight)
    for num_threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
        logits = head.logits(x)
        # A product that lies between two steps may be rounded to either.
        assert torch.allclose(logits.double(), rounded(x.double()) @ rounded(weight.double()).T, rtol=0, atol=0.02 * hidden**0.5)
        assert logits.shape == (rows, vocab) and logits.dtype is torch.float32
    assert torch.equal(head.logits(x[-1:]), logits[-1:]), "rows are by themselves"


def test_it_is_near_the_head(kernels):
    weight, x = torch.randn(4096, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    exact, guessed = x.double() @ weight.double().T, NativeGuessHead(kernels, CpuRuntime().empty, weight).logits(x).double()
    assert (guessed - exact).norm() < 0.015 * exact.norm()
    assert (guessed.argmax(1) == exact.argmax(1)).double().mean() > 0.9


def test_what_was_recorded_sees_new_values(kernels):
    weight = torch.randn(128, 32)
    head, x, recorder = NativeGuessHead(kernels, CpuRuntime().empty, weight), torch.randn(1, 32), Recorder(kernels)
    again = recorder.capture(lambda: head.logits(x))
    with torch.inference_mode():
        before = [again().clone() for _ in range(2)]
        head.fill(-weight)
        assert torch.equal(before[0], before[1]) and torch.equal(again(), -before[0])


def test_rows_without_values_and_numbers_that_are_none(kernels):
    weight = torch.randn(128, 32)
    weight[3] = 0
    head = NativeGuessHead(kernels, CpuRuntime().empty, weight)
    assert torch.equal(head.logits(torch.zeros(1, 32)), torch.zeros(1, 128))
    assert head.logits(torch.ones(1, 32))[0, 3] == 0
    for value in (float("nan"), float("inf")):
        assert head.logits(torch.full((2, 32), value)).shape == (2, 128), "they are guesses, and do no harm"
