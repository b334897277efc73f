"""Opening a backend, and the runtime and local expert communication of each that this machine has."""

import pytest
import torch

from hw.api import Activation, ExpertMode, ExpertStep
from hw.cpu.invariant import InvariantOps
from hw.select import NAMES, open_backend
from hw.testing import available_backends

MODES = pytest.mark.parametrize("mode", list(ExpertMode))
BACKENDS = pytest.mark.parametrize("name", available_backends())


def test_select():
    for kernels in ("native", "torch"):
        assert isinstance(open_backend("cpu", batch_invariant=True, cpu_kernels=kernels).ops, InvariantOps)
        opened = open_backend("cpu", cpu_kernels=kernels)
        assert not isinstance(opened.ops, InvariantOps) and hasattr(opened.ops, "kernels") == (kernels == "native")
    assert open_backend("cpu", max_dispatch_tokens_per_rank=7).expert_comm.max_tokens_per_rank == 7
    with pytest.raises(ValueError, match="unknown device 'gpu', known are: " + ", ".join(NAMES)):
        open_backend("gpu")


def test_number_of_threads():
    open_backend("cpu", num_threads=1)
    assert torch.get_num_threads() == 1
    open_backend("cpu")
    assert torch.get_num_threads() == 1


@BACKENDS
def test_runtime(name: str):
    runtime = open_backend(name).runtime
    memory = runtime.memory()
    assert 0 <= memory.free_bytes <= memory.total_bytes
    assert memory.total_bytes > 1 << 28
    assert runtime.default_cache_bytes() is None or runtime.default_cache_bytes() > 0
    assert 1 <= runtime.num_sharing(8) <= 8
    assert runtime.compute_dtype("float32") == "float32"
    assert runtime.compute_dtype("bfloat16") in ("float32", "bfloat16")
    runtime.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("shape", [(3, 4, 5), (1,), (0, 7)])
@BACKENDS
def test_zeros_are_zero_and_writable(name: str, shape: tuple[int, ...], dtype: torch.dtype):
    zeros = open_backend(name).runtime.zeros(shape, dtype)
    assert zeros.shape == shape and zeros.dtype == dtype and zeros.is_contiguous()
    assert not zeros.float().any()
    zeros.copy_(torch.ones(shape))
    assert zeros.float().sum() == zeros.numel()


@BACKENDS
def test_storage_of_weights_is_nobody_elses(name: str):
    runtime = open_backend(name).runtime
    shapes = [(3,), (0, 4), (1000, 33), (7, 1), (1 << 24,), (2, 3, 4), (9,)]
    found = [runtime.empty(shape, dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)]
    for i, tensor in enumerate(found):
        tensor.copy_(torch.full(tensor.shape, float(i)))
    assert all((tensor.float() == i).all() for i, tensor in enumerate(found) if tensor.dtype != torch.float8_e4m3fn)
    assert all(tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() for tensor in found)


def random_topk(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Distinct experts for each token."""
    return torch.rand(num_tokens, num_experts).argsort(-1)[:, :top_k]


@MODES
@BACKENDS
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (1, 1), (1, 4), (9, 3), (40, 8)])
def test_what_is_dispatched_comes_home(name: str, mode: ExpertMode, num_tokens: int, top_k: int):
    num_experts, dim = 9, 6
    backend = open_backend(name, max_dispatch_tokens_per_rank=40)
    comm, device = backend.expert_comm, backend.runtime.device
    x, topk = torch.randn(num_tokens, dim).to(device), random_topk(num_tokens, top_k, num_experts).to(device)
    weight = torch.rand(num_tokens, top_k).to(device)
    sent = comm.dispatch(Activation(x), topk, weight, ExpertStep(mode, num_tokens), num_experts)
    counts = [int((topk == e).sum()) for e in range(num_experts)]
    assert sent.mode is mode and sent.counts.tolist() == counts
    if mode is ExpertMode.THROUGHPUT:
        assert sent.layout.align == 1 and sent.x.shape == (num_tokens * top_k, dim)
        if sent.layout.counts is None:  # they stay on the device
            assert sent.layout.ends.tolist() == torch.tensor(counts).cumsum(0).tolist()
        else:
            assert sent.layout.counts == counts
        groups = sent.x.split(counts)
    else:
        assert sent.layout is None and sent.x.shape[0] == num_experts and sent.x.shape[2] == dim
        groups = [sent.x[e, : counts[e]] for e in range(num_experts)]
    for e, rows in enumerate(groups):
        assert torch.equal(rows, x[(topk == e).any(-1)]), f"expert {e} gets its tokens in the order of the batch"
    # Expert e multiplies by e + 1.
    factors = torch.arange(1.0, num_experts + 1, device=device)
    if mode is ExpertMode.THROUGHPUT:
        y = sent.x * factors.repeat_interleave(sent.counts)[:, None]
    else:
        y = sent.x * factors[:, None, None]
        y[torch.arange(y.shape[1], device=device) >= sent.counts[:, None]] = torch.nan  # rows that are not real must not come home
    home = comm.combine(y, weight, sent)
    x, topk, weight = x.cpu(), topk.cpu(), weight.cpu()
    expected = torch.zeros(num_tokens, dim)
    for t in range(num_tokens):
        for k in range(top_k):
            expected[t] += x[t] * (topk[t, k] + 1) * weight[t, k]
    assert home.dtype == torch.float32
    torch.testing.assert_close(home.cpu(), expected)


@MODES
@BACKENDS
def test_sums_run_in_topk_order_in_fp32(name: str, mode: ExpertMode):
    backend = open_backend(name)
    comm, device = backend.expert_comm, backend.runtime.device
    x = torch.ones(1, 4, dtype=torch.bfloat16, device=device)
    weight = torch.tensor([[2.0**12, 2.0**-11, -(2.0**12), 1.0]], device=device)
    sent = comm.dispatch(Activation(x), torch.tensor([[3, 0, 2, 1]], device=device), weight, ExpertStep(mode, 1), 4)
    home = comm.combine(sent.x.float(), weight, sent)
    # In bf16, or with the one added before the large terms have gone, the small term would be lost.
    assert home.tolist() == [[1.0 + 2.0**-11] * 4]
    big = torch.tensor([[2.0**24, 1.0, -(2.0**24), 0.0]], device=device)
    assert comm.combine(sent.x.float(), big, sent).tolist() == [[0.0] * 4]  # fp32, first to last: 2^24 + 1 is 2^24


@BACKENDS
def test_low_latency_refuses_more_tokens_than_its_cap(name: str):
    backend = open_backend(name, max_dispatch_tokens_per_rank=3)

    def dispatch(num_tokens: int, mode: ExpertMode) -> None:
        x, topk = torch.zeros(num_tokens, 2), torch.zeros(num_tokens, 1, dtype=torch.int64)
        device = backend.runtime.device
        weight = torch.zeros(num_tokens, 1, device=device)
        backend.expert_comm.dispatch(Activation(x.to(device)), topk.to(device), weight, ExpertStep(mode, num_tokens), 1)

    dispatch(3, ExpertMode.LOW_LATENCY)
    with pytest.raises(AssertionError, match=r"\(4, 3\)"):
        dispatch(4, ExpertMode.LOW_LATENCY)
    dispatch(4, ExpertMode.THROUGHPUT)
