"""Captured work on a CPU: repetitions do what the work does, and what cannot be repeated is done again."""

import os
import signal
import threading
from dataclasses import dataclass

import pytest
import torch

from hw.cpu import recording
from hw.cpu.native import NoKernels, open_kernels
from hw.cpu.native_ops import NativeOps
from hw.cpu.recording import Recorder


@pytest.fixture(scope="module")
def kernels():
    try:
        return open_kernels()
    except NoKernels as error:
        pytest.fail(f"the kernels cannot be had: {error}")


@dataclass
class Counted:
    """Work that says how often it ran itself."""

    work: object
    num_runs: int = 0

    def __call__(self):
        self.num_runs += 1
        return self.work()


def repeated(kernels, work, inputs: torch.Tensor, values: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """What captured work comes to for each of `values`, put into `inputs`, and how often it ran itself."""
    counted = Counted(work)
    captured = Recorder(kernels).capture(counted)
    found = []
    with torch.inference_mode():
        for value in values:
            inputs.copy_(value)
            found.append(captured().clone())
    return found, counted.num_runs


def test_kernels_and_torch_are_repeated_in_order(kernels):
    torch.manual_seed(0)
    ops, weight, norm = NativeOps(kernels), torch.randn(24, 16), torch.randn(16)
    x, total = torch.zeros(3, 16), torch.zeros(3, 24)
    values = [torch.randn(3, 16) for _ in range(4)]

    def work() -> torch.Tensor:
        normed = ops.rms_norm(x.flatten().view(3, 16) * 2, norm, 1e-6)
        product = ops.linear(normed, weight)
        total.add_(product.to(torch.bfloat16).to(torch.float32))  # in place, of something made by a composite op
        largest = total.max(dim=1)  # two results
        picked = total[torch.tensor([2, 0]), largest.indices[:2]]
        return torch.cat((picked, largest.values, product.sum(-1)))

    expected = []
    for value in values:
        x.copy_(value)
        expected.append(work())
    total.zero_()
    found, num_runs = repeated(kernels, work, x, values)
    assert num_runs == 1
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_copies_of_rows_are_calls_of_kernels(kernels):
    """Picked and put by index, joined, strided, converted; what a kernel cannot do is torch's."""
    idx, table, kept = torch.tensor([4, -1, 0]), torch.randn(6, 8), torch.zeros(6, 5, dtype=torch.int64)
    x = torch.zeros(3, 8)
    values = [torch.randn(3, 8) for _ in range(3)]
    sums = (idx + 2).clone()

    def work(inputs: torch.Tensor) -> torch.Tensor:
        picked = table[idx]
        joined = torch.cat((inputs[:, 2:6], picked, inputs.clone()), dim=-1)
        table[idx[:2], :] = joined[:2, 4:12].contiguous()
        table[idx[2:]] = inputs[0]  # a row without its dimension
        kept[idx, 1] = idx + 2
        kept[:, 3].copy_(kept[:, 1])
        wide = joined.bfloat16().float()
        wide[:, 1:3] = joined[:, 0:2]
        return torch.cat((wide, kept[idx].float()), dim=1)

    start, expected = table.clone(), []
    for value in values:
        expected.append(work(value))
    table.copy_(start), kept.zero_()
    captured = Recorder(kernels).capture(lambda: work(x))
    with torch.inference_mode():
        for value, wanted in zip(values, expected, strict=True):
            x.copy_(value)
            assert torch.equal(captured(), wanted)
    assert kept[idx, 3].tolist() == sums.tolist()
    assert sum(not isinstance(step, recording._Calls) for step in captured._steps) == 4, "two clones and two conversions are torch's"


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x[: int(x.sum())],
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + 1 if torch.equal(x, x.abs()) else x - 1,
        lambda x: x.where(x > 0, 7.0) if bool(x[0] > 0) else x * 0,
        lambda x: torch.arange(4.0).add_(x),
    ],
    ids=["value", "mask", "nonzero", "comparison", "condition", "constant"],
)
def test_what_depends_on_values_is_done_again(kernels, work):
    x = torch.zeros(4)
    values = [torch.tensor([1.0, 0.0, 2.0, 0.0]), torch.tensor([0.0, -1.0, 1.0, 1.0]), torch.ones(4)]
    found, num_runs = repeated(kernels, lambda: work(x), x, values)
    assert num_runs == len(values)
    for one, value in zip(found, values, strict=True):
        assert torch.equal(one, work(value))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_is_begun_is_done_once_it_has_been_waited_for(kernels, num_threads):
    """On another thread or not, two at once, and with torch's ops in it; what is dropped meanwhile ends first."""
    ops, weight = NativeOps(kernels), torch.randn(512, 64)
    x, out, other = torch.zeros(8, 64), torch.zeros(8, 512), torch.zeros(8)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        recorder = Recorder(kernels)
        product = recorder.capture(lambda: out.copy_(ops.linear(x, weight)))
        mixed = recorder.capture(lambda: other.copy_(ops.linear(x, weight).sum(1).exp().log1p()))
        with torch.inference_mode():
            begin_product, begin_mixed = recorder.chain([], [product]), recorder.chain([], [mixed])
            begin_product(), begin_mixed()
            for _ in range(20):
                x.copy_(torch.randn(8, 64).div_(100))
                waits = [begin_product(), begin_mixed()]
                expected = ops.linear(x, weight)  # has no helpers while the product has
                for wait in waits:
                    wait()
                assert torch.equal(out, expected) and torch.equal(other, expected.sum(1).exp().log1p())
            out.zero_()
            begin_product()
            del begin_product, waits, wait
            assert torch.equal(out, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_beside", [0, 1, 2])
def test_works_of_a_chain_run_in_order(kernels, num_threads, num_beside, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    ops, weight, table = NativeOps(kernels), torch.randn(512, 64), torch.randn(9, 64)
    idx, out, copy, recorder = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 512), torch.zeros(8, 512), Recorder(kernels)
    first = recorder.capture(lambda: out.copy_(ops.linear(table.index_select(0, idx), weight)))
    second = recorder.capture(lambda: copy.copy_(out))
    works = [first, second]
    chain = recorder.chain(works[: 2 - num_beside], works[2 - num_beside :])
    with torch.inference_mode():
        for _ in range(20):
            idx.copy_(torch.randint(9, (8,)))
            expected = ops.linear(table.index_select(0, idx), weight)
            chain()()
            assert torch.equal(out, expected) and torch.equal(copy, expected)
    assert [len(one._steps) for one in (first, second)] == [1, 1], "nothing is left to torch"


def test_work_beside_what_torch_does_in_part(kernels, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ops, weight, x, recorder = NativeOps(kernels), torch.randn(512, 64), torch.zeros(8, 64), Recorder(kernels)
    exp, out = torch.zeros(8, 64), torch.zeros(8, 512)
    first = recorder.capture(lambda: exp.copy_(x.exp().log1p()))
    begin = recorder.chain([first], [recorder.capture(lambda: out.copy_(ops.linear(exp, weight)))])
    with torch.inference_mode():
        for number in range(20):
            x.copy_(torch.randn(8, 64))
            wait = begin()
            assert number < 2 or begin._begun, "on another thread"
            wait()
            assert torch.equal(out, ops.linear(x.exp().log1p(), weight))
    assert len(first._steps) > 1, "torch does a part"


def test_several_who_share_the_threads(kernels, monkeypatch):
    """Each begins work and shares other work meanwhile, of others' and of its own."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    ops, recorder, wrong, threads = NativeOps(kernels), Recorder(kernels), [], []

    @torch.inference_mode()
    def work(begin, weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        for _ in range(3000):
            x.copy_(torch.randn(8, 64))
            wait, expected = begin(), ops.linear(x, weight)
            wait()
            if not torch.equal(out, expected):
                wrong.append(weight)

    for _ in range(3):
        weight, x, out = torch.randn(1024, 64), torch.zeros(8, 64), torch.zeros(8, 1024)
        with torch.inference_mode():
            begin = recorder.chain([], [recorder.capture(lambda x=x, weight=weight, out=out: out.copy_(ops.linear(x, weight)))])
            begin()
        threads.append(threading.Thread(target=work, args=(begin, weight, x, out)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_process_does_not_wait_for_what_its_parent_began(kernels, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ops, weight, x, recorder = NativeOps(kernels), torch.randn(4096, 256), torch.randn(64, 256), Recorder(kernels)
    begin = recorder.chain([], [recorder.capture(lambda: ops.linear(x, weight))])
    with torch.inference_mode():
        begin()()
        wait = begin()
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends it
        wait()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    wait()


def test_memory_that_is_kept_is_bounded(kernels, monkeypatch):
    monkeypatch.setattr(recording, "KEPT_BYTES", 1000)
    recorder, x = Recorder(kernels), torch.ones(100)
    small, large = Counted(lambda: x + 1), Counted(lambda: (x + 1) * 2)  # 400 bytes, then 800 more
    captured = [recorder.capture(small), recorder.capture(large)]
    for _ in range(3):
        assert [one().sum().item() for one in captured] == [200.0, 400.0]
    assert (small.num_runs, large.num_runs) == (1, 3)


def test_kernels_are_themselves_again_after_a_failure(kernels):
    before = kernels.product

    def work():
        raise RuntimeError("broken")

    captured = Recorder(kernels).capture(work)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            captured()
    assert kernels.product is before
