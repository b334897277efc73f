"""Batch invariance, bit by bit: a row's result is the same alone, in any company and in any order.

Every op is a function from rows to rows here. Thread counts matter: the library cuts large batches at other places with each.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hw import testing
from hw.api import ExpertRows, GateRule, Ops, SampleInputs
from hw.cpu.ops import CpuOps
from hw.select import open_backend

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
V3_GATE = GateRule(6, "sigmoid", 4, 2, "top2_sum", True, 2.5)
V2_GATE = GateRule(6, "softmax", 4, 2, "max", False, 16.0)
# rows -> results, one entry of each result tensor per row
Rowwise = Callable[[torch.Tensor], Any]


@pytest.fixture(params=[1, 3], ids=["1-thread", "3-threads"])
def threads(request: pytest.FixtureRequest, one_thread: None):
    """Three cut a batch in the middle of a row, at places that are no multiple of a vector."""
    torch.set_num_threads(request.param)
    return request.param


@pytest.fixture(params=["native", "torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return open_backend("cpu", batch_invariant=True, cpu_kernels=request.param).ops


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(result, torch.Tensor):
        return (result,)
    return result if isinstance(result, tuple) else tuple(vars(result).values())


def first_difference(function: Rowwise, num_rows: int, sizes: tuple[int, ...] = (1, 2, 15, 16, 17, 40)) -> str | None:
    """Compare rows of the whole batch with the same rows in smaller batches and in another order; None if all bits agree."""
    whole = tensors(function(torch.arange(num_rows)))
    batches = [torch.randperm(num_rows)]
    for size in sizes:
        batches += [torch.randint(0, num_rows, (size,)) for _ in range(3)]
    for rows in batches:
        for part, (got, expected) in enumerate(zip(tensors(function(rows)), whole, strict=True)):
            if not torch.equal(got, expected[rows]):
                return f"result {part} of {len(rows)} rows differs from that of {num_rows}"
    return None


@DTYPES
@pytest.mark.parametrize(("inner", "outer"), [(48, 40), (1000, 33), (512, 300)])
def test_linear(ops: Ops, threads: int, dtype: torch.dtype, inner: int, outer: int):
    x, w = torch.randn(150, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    assert first_difference(lambda rows: ops.linear(x[rows], w), 150) is None
    # Rows of a wider tensor, as a layer cuts them, and a weight that starts at an odd address.
    wide, storage = torch.cat((x, x), dim=1), torch.zeros(w.numel() + 3, dtype=dtype)
    shifted = storage[3:].view_as(w).copy_(w)
    assert torch.equal(ops.linear(wide[:, inner:], shifted), ops.linear(x, w))


@DTYPES
def test_head_matmul(ops: Ops, threads: int, dtype: torch.dtype):
    x, w = torch.randn(90, 4, 48).to(dtype), torch.randn(4, 48, 70).to(dtype)
    assert first_difference(lambda rows: ops.head_matmul(x[rows], w), 90) is None


@DTYPES
@pytest.mark.parametrize("width", [72, 1000, 2048])
def test_elementwise(ops: Ops, threads: int, dtype: torch.dtype, width: int):
    x, residual, weight = torch.randn(200, width).to(dtype), torch.randn(200, width).to(dtype), torch.randn(width).to(dtype)
    gate_up = torch.cat((x, residual), dim=-1) * 3
    assert first_difference(lambda rows: ops.rms_norm(x[rows], weight, 1e-6), 200) is None
    assert first_difference(lambda rows: ops.add_rms_norm(x[rows], residual[rows], weight, 1e-6)[0].rows(quantized=False), 200) is None
    assert first_difference(lambda rows: ops.silu_mul(gate_up[rows]), 200) is None
    positions, table = torch.randint(0, 999, (200,)), torch.randn(999, width // 4)
    heads = x.view(200, 4, width // 4)
    assert first_difference(lambda rows: ops.rope(heads[rows], positions[rows], table), 200) is None


@pytest.mark.parametrize("rule", [V2_GATE, V3_GATE], ids=["v2", "v3"])
@pytest.mark.parametrize("num_experts", [36, 256])
def test_gate_topk(ops: Ops, threads: int, rule: GateRule, num_experts: int):
    logits, bias = torch.randn(1200, num_experts), torch.randn(num_experts)
    copies = testing.replicas(num_experts)
    assert first_difference(lambda rows: ops.gate_topk(logits[rows], bias, rule, copies), 1200) is None


@DTYPES
@pytest.mark.parametrize(
    ("query_len", "num_heads", "latent", "rope", "page_size"), [(1, 16, 64, 16, 64), (3, 5, 24, 8, 16), (1, 20, 128, 64, 64)]
)
def test_mla_decode(ops: Ops, threads: int, dtype: torch.dtype, query_len: int, num_heads: int, latent: int, rope: int, page_size: int):
    num_seqs, longest, dim = 70, 300, latent + rope
    lens = torch.randint(query_len, 40, (num_seqs,), dtype=torch.int32)
    lens[::9], lens[3] = longest, 0  # short ones with much longer companions, and an empty one
    max_pages = -(-longest // page_size)
    cache = torch.randn(num_seqs * max_pages, page_size, dim).to(dtype)
    page_table = torch.randperm(num_seqs * max_pages).view(num_seqs, max_pages).int()
    page_table[torch.arange(max_pages) >= -(-lens[:, None] // page_size)] = -1
    q = torch.randn(num_seqs, query_len, num_heads, dim).to(dtype)

    def decode(rows: torch.Tensor):
        bound = int(lens[rows].max())
        pages = -(-bound // page_size)
        return ops.mla_decode(q[rows], cache, page_table[rows, :pages], lens[rows], bound, latent, dim**-0.5, with_lse=True)

    assert first_difference(decode, num_seqs, (1, 2, 5, 17, 65)) is None
    # Verification of drafts equals decoding one token after the other; so does a chunk of prefill.
    out, lse = ops.mla_decode(q, cache, page_table, lens, longest, latent, dim**-0.5, with_lse=True)
    for j in range(query_len):
        seen = (lens - query_len + 1 + j).clamp(min=0)
        one_out, one_lse = ops.mla_decode(q[:, j : j + 1], cache, page_table, seen, longest, latent, dim**-0.5, with_lse=True)
        assert torch.equal(one_out[:, 0], out[:, j]) and torch.equal(one_lse[:, 0], lse[:, j])


@DTYPES
def test_grouped_linear(ops: Ops, threads: int, dtype: torch.dtype):
    """Rows of two experts, in batches with other numbers of rows for each."""
    x, w = torch.randn(80, 48).to(dtype), torch.randn(3, 40, 48).to(dtype)
    whole = ops.grouped_linear(x, w, ExpertRows([50, 0, 30]))
    for first, last in ((0, 1), (3, 20), (49, 50), (0, 50)):
        assert torch.equal(ops.grouped_linear(x[first:last], w, ExpertRows([last - first, 0, 0])), whole[first:last])
        rows = torch.cat((x[first:last], x[60:61]))
        assert torch.equal(ops.grouped_linear(rows, w, ExpertRows([last - first, 0, 1])), torch.cat((whole[first:last], whole[60:61])))
        masked = torch.randn(3, last - first + 7, 48).to(dtype)
        masked[0, : last - first] = x[first:last]
        out = ops.grouped_linear_masked(masked, w, torch.tensor([last - first, 0, 0]))
        assert torch.equal(out[0, : last - first], whole[first:last])


@pytest.mark.parametrize("vocab_size", [101, 4000, 129_280])
def test_logprobs_and_sample(ops: Ops, threads: int, vocab_size: int):
    num_rows = 40 if vocab_size < 100_000 else 5
    logits, tokens = torch.randn(num_rows, vocab_size) * 3, torch.randint(0, vocab_size, (num_rows,))
    assert first_difference(lambda rows: ops.logprobs(logits[rows], tokens[rows], 5), num_rows, (1, 2, 7)) is None
    off = torch.rand(num_rows) < 0.3
    temperature, top_k = (torch.rand(num_rows) + 0.3).masked_fill(off, 0.0), torch.randint(0, 50, (num_rows,))
    filters = top_k, torch.rand(num_rows), torch.rand(num_rows) * 0.1
    settings = (temperature, *filters, torch.randint(0, 2**62, (num_rows,)), torch.randint(0, 3, (num_rows,)), torch.arange(num_rows))

    def sample(rows: torch.Tensor):
        return ops.sample(logits[rows], SampleInputs(*(column[rows] for column in settings), True, True))

    assert first_difference(sample, num_rows, (1, 2, 7)) is None


def test_the_plain_ops_do_not_have_this_property():
    """What the flag is for; also shows that these tests can fail."""
    x, w = torch.randn(150, 1000), torch.randn(300, 1000)
    assert first_difference(lambda rows: CpuOps().linear(x[rows], w), 150) is not None


def test_prefill_takes_the_form_of_decode(ops: Ops):
    assert all(ops.prefers_absorbed(query_len, context_len, None) for query_len in (1, 4096) for context_len in (0, 10_000))
