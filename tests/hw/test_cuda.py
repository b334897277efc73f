"""The GPU's library kernels and the shapes of V3, which only a GPU has time for; what must hold there beyond the common grids."""

import dataclasses

import pytest
import torch

from hw import testing
from hw.api import Activation, ExpertMode, ExpertRows, ExpertStep, GateRule, SampleInputs, Unsupported
from hw.cpu.reference.ops import ReferenceOps
from hw.groups import Groups
from hw.quant import QuantTensor, dequantize, quantize_activation, quantize_weight_blocks
from hw.select import open_backend
from hw.testing import assert_close, available_backends, tolerance
from hw.topology import ParallelConfig
from tests.hw.op_calls import Call, normal, pages, segments, table, weight
from tests.hw.test_parity import check, to_device

pytestmark = pytest.mark.skipif("cuda" not in available_backends(), reason="needs an NVIDIA GPU")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def opened():
    return open_backend("cuda")


@pytest.fixture(scope="module")
def composites(opened):
    """The same ops without the libraries."""
    return type(opened.ops)(flash_mla=None, deep_gemm=None)


def test_what_is_refused_and_why():
    with pytest.raises(Unsupported, match="cuda: batch_invariant, since FlashMLA"):
        open_backend("cuda", batch_invariant=True)

    class Ranks:
        size = 1000

    many = Groups(parallel=ParallelConfig(dp=1000), rank=0, world=Ranks(), tp=Ranks(), ep=Ranks())
    with pytest.raises(Unsupported, match=r"cuda: 1000 ranks on a machine with .* each rank needs its own"):
        open_backend("cuda", many)


@pytest.mark.parametrize("library", [True, False], ids=["flash-mla", "triton"])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(
    ("query_len", "lens"), [(1, (1,)), (1, (700, 1, 64, 65, 0, 1023)), (2, (2, 130, 64, 0)), (4, (4, 1023)), (70, (300,))]
)
def test_decode_of_v3(opened, composites, library: bool, num_heads: int, query_len: int, lens: tuple[int, ...]):
    cache, page_table = pages(lens, 64, 576, 2, BF16)
    q = normal(len(lens), query_len, num_heads, 576, dtype=BF16)
    args = (q, cache, page_table, torch.tensor(lens, dtype=torch.int32), max(lens), 512, 576**-0.5, None, True)
    check(opened.ops if library else composites, "mla_decode", "v3", Call(args), opened.runtime.device)


@pytest.mark.parametrize("gap", [0, 576])
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_of_v3(opened, causal: bool, gap: int):
    """gap: of the rows of queries, where they come out of one product with the latents."""
    q_lens, k_lens = (1, 1023, 129), (64, 1023, 700)
    q = normal(sum(q_lens), 8 * 192 + gap, dtype=BF16)[:, : 8 * 192].unflatten(1, (8, 192))
    k = normal(sum(k_lens), 8, 192, dtype=BF16)
    v = normal(sum(k_lens), 8, 128, dtype=BF16)
    check(opened.ops, "mla_prefill", "v3", Call((q, k, v, segments(q_lens), segments(k_lens), 192**-0.5, causal)), opened.runtime.device)


def test_rows_of_v3(opened):
    device, ops = opened.runtime.device, opened.ops
    x, residual, norm = normal(129, 7168, dtype=BF16), normal(129, 7168, dtype=BF16), normal(7168, dtype=BF16)
    check(ops, "add_rms_norm", "v3", Call((x, residual, norm, 1e-6)), device)
    check(ops, "silu_mul", "v3", Call((normal(129, 36864, dtype=BF16),)), device)
    down, positions = normal(129, 2112, dtype=BF16), torch.randint(0, 9000, (129,))
    cache, slots = normal(20, 64, 576, dtype=BF16), torch.randperm(20 * 64)[:129]
    slots[5] = -1
    for quant in (False, True):
        args = (down, normal(1536, dtype=BF16), normal(512, dtype=BF16), 1e-6, positions, table(9000, 64), cache, slots, quant)
        check(ops, "latent_write", f"v3, quantised {quant}", Call(args, changes=(6,)), device)
    rule = GateRule(8, "sigmoid", 8, 4, "top2_sum", True, 2.5)
    check(ops, "gate_topk", "v3", Call((torch.randn(1023, 256), torch.randn(256) * 0.2, rule, testing.replicas(256, 2))), device)
    kv_up = weight(128, 256, 512, dtype=BF16)
    check(ops, "absorb_query", "v3", Call((normal(129, 128, 192, dtype=BF16), positions, table(9000, 64), kv_up[:, :128])), device)
    for quant in (False, True):
        check(ops, "unabsorb", "v3", Call((normal(129, 128, 512, dtype=BF16), kv_up[:, 128:], quant)), device)
    check(ops, "expand_latent", "v3", Call((normal(129, 512, dtype=BF16), normal(129, 64, dtype=BF16), kv_up, 128)), device)


@pytest.mark.parametrize("num_rows", [1, 7, 130])
def test_quantised_with_the_op_before_or_on_their_own_the_rows_are_the_same_bits(opened, num_rows: int):
    from hw.cuda.quantize import quantize

    ops, device = opened.ops, opened.runtime.device
    put = lambda *shape: normal(*shape, dtype=BF16).to(device)  # noqa: E731
    forms, _ = ops.add_rms_norm(put(num_rows, 7168), put(num_rows, 7168), put(7168), 1e-6, True, True)
    gate_up = put(num_rows, 4096)
    masked, counts = put(4, num_rows, 4096), torch.tensor([num_rows, 0, 1, num_rows // 2], device=device, dtype=torch.int32)
    pairs = [(forms.quant, forms.dense), (ops.silu_mul(gate_up, True), ops.silu_mul(gate_up))]
    apart, dense = ops.silu_mul(masked, True, counts), ops.silu_mul(masked, False, counts)
    pairs += [(QuantTensor(apart.data[e, :n], apart.scale[e, :n], block=(1, 128)), dense[e, :n]) for e, n in enumerate(counts.tolist())]
    for fused, rows in pairs:
        alone = quantize(rows)
        assert torch.equal(fused.data.view(torch.uint8), alone.data.view(torch.uint8)) and torch.equal(fused.scale, alone.scale)


def test_sampling_of_a_large_vocabulary(opened):
    num, vocab = 6, 129_280
    keys = (torch.arange(num) - 3, torch.zeros(num, dtype=torch.int64), torch.arange(num) * 1000)
    top_k, top_p = torch.tensor([0, 50, 0, 1000, 0, 0]), torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 1.0])
    inputs = SampleInputs(torch.tensor([0.0, 1, 1, 0.7, 1, 1.3]), top_k, top_p, torch.tensor([0, 0, 0, 0, 0.01, 0]), *keys, True, True)
    check(opened.ops, "sample", "v3", Call((torch.randn(num, vocab) * 3, inputs)), opened.runtime.device)


@pytest.mark.parametrize("region", [1024, 8])
def test_filters_with_lists_that_fit_and_that_do_not(opened, monkeypatch: pytest.MonkeyPatch, region: int):
    monkeypatch.setattr("hw.cuda.sampling._REGION", region)
    top_k = torch.tensor([0, 0, 0, 5, 40, 252, 253, 5000, 0, 30])
    top_p = torch.tensor([0.5, 0.95, 0.9999, 1.0, 0.9, 0.99, 1.0, 0.8, 1.0, 0.7])
    min_p = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 0, 1e-3, 1e-2])
    num = len(top_k)
    keys = (torch.arange(num) * 31, torch.zeros(num, dtype=torch.int64), torch.arange(num))
    inputs = SampleInputs(torch.rand(num) + 0.5, top_k, top_p, min_p, *keys, True, True)
    check(opened.ops, "sample", "lists", Call((torch.randn(num, 129_280) * 3, inputs)), opened.runtime.device)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs_of_a_large_vocabulary(opened, num_top: int):
    logits = torch.randn(5, 129_280) * 4
    check(opened.ops, "logprobs", "v3", Call((logits, torch.randint(0, 129_280, (5,)), num_top)), opened.runtime.device)


@pytest.mark.parametrize("shape", [(1, 128), (7, 7168), (1023, 1536)])
def test_quantising_activations_is_the_reference_to_the_bit(opened, shape: tuple[int, int]):
    from hw.cuda.quantize import quantize

    x = normal(*shape, dtype=BF16)
    x[0, :128] = 0.0
    found, expected = quantize(x.to(opened.runtime.device)), quantize_activation(x)
    assert_close(found.scale, expected.scale, (0.0, 0.0), "scales")
    assert_close(found.data.float(), expected.data.float(), (0.0, 0.0), "data")
    assert found.scale.stride() == (1, -(-shape[0] // 4) * 4)


def quantized_product(x: torch.Tensor, w: QuantTensor) -> torch.Tensor:
    """What FP8 means: both sides quantised, the product of their values in fp32."""
    return (dequantize(quantize_activation(x)) @ dequantize(w).T).to(x.dtype)


@pytest.mark.parametrize("num_rows", [0, 1, 130])
@pytest.mark.parametrize(("outer", "inner"), [(576, 512), (2112, 7168)])
def test_fp8_products(opened, num_rows: int, outer: int, inner: int):
    x, w = normal(num_rows, inner, dtype=BF16), quantize_weight_blocks(weight(outer, inner, dtype=torch.float32))
    assert opened.ops.quantizes(w, BF16) and not opened.ops.quantizes(w, torch.float32)
    for rows in (x, quantize_activation(x)):
        actual = opened.ops.linear(*(to_device(arg, opened.runtime.device) for arg in (rows, w)))
        assert_close(actual, quantized_product(x, w), tolerance(BF16), "linear")


COUNTS = (3, 0, 130, 1, 16)


def test_fp8_products_of_experts(opened):
    outer, inner, device = 512, 1024, opened.runtime.device
    w = quantize_weight_blocks(weight(len(COUNTS), outer, inner, dtype=torch.float32))
    there = to_device(w, device)
    x = normal(sum(COUNTS), inner, dtype=BF16)
    actual = opened.ops.grouped_linear(x.to(device), there, ExpertRows(list(COUNTS)))
    rows = [quantized_product(part, w.expert(e)) for e, part in enumerate(x.split(COUNTS))]
    assert_close(actual, torch.cat(rows), tolerance(BF16), "contiguous")
    # A capacity that is no multiple of a tile: a full expert's last tile must not reach into the next one's rows.
    for counts in (COUNTS, (7, 7, 0, 1, 7), (128, 0, 128, 128, 1)):
        masked = normal(len(counts), max(counts), inner, dtype=BF16)
        masked[torch.arange(max(counts)) >= torch.tensor(counts)[:, None]] = torch.nan
        actual = opened.ops.grouped_linear_masked(masked.to(device), there, torch.tensor(counts, device=device, dtype=torch.int32)).cpu()
        for e, count in enumerate(counts):
            assert_close(actual[e, :count], quantized_product(masked[e, :count], w.expert(e)), tolerance(BF16), f"{counts}, expert {e}")


@pytest.mark.parametrize("library", [True, False], ids=["libraries", "triton"])
def test_bf16_products_of_experts(opened, composites, library: bool):
    ops, device = opened.ops if library else composites, opened.runtime.device
    w = weight(len(COUNTS), 2048, 1024, dtype=BF16)
    for counts in (COUNTS, (7, 7, 0, 1, 7), (128, 0, 128, 128, 1)):
        x = normal(len(counts), max(counts), 1024, dtype=BF16)
        real = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        call = Call((x, w, torch.tensor(counts, dtype=torch.int32)), real=lambda result, real=real: result[real.to(result.device)])
        check(ops, "grouped_linear_masked", str(counts), call, device)
        check(ops, "grouped_linear", str(counts), Call((x[real], w, ExpertRows(list(counts)))), device)


def test_nothing_waits_in_a_decode_step(opened, composites):
    """Each op of a decode step under torch's guard, which raises where torch itself would wait for the device."""
    device = opened.runtime.device
    put = lambda *values: [to_device(value, device) for value in values]  # noqa: E731
    num, lens = 5, (3, 64, 65, 1, 130)
    cache, page_table = pages(lens, 64, 576, 1, BF16)
    keys = (torch.arange(num), torch.zeros(num, dtype=torch.int64), torch.arange(num))
    ones = torch.ones(num)
    rule = GateRule(2, "sigmoid", 4, 2, "top2_sum", True, 1.0)
    inputs = SampleInputs(ones, torch.full((num,), 5), 0.9 * ones, 0.01 * ones, *keys, True, True)
    w8, w8_experts = quantize_weight_blocks(weight(512, 512, dtype=BF16)), quantize_weight_blocks(weight(4, 512, 512, dtype=BF16))
    calls = [
        ("rms_norm", [*put(normal(num, 512, dtype=BF16), normal(512, dtype=BF16)), 1e-06]),
        ("rope", put(normal(num, 2, 64, dtype=BF16), torch.arange(num), table(99, 64))),
        ("linear", put(normal(num, 512, dtype=BF16), weight(64, 512, dtype=BF16))),
        ("linear", put(normal(num, 512, dtype=BF16), w8)),
        ("absorb_query", put(normal(num, 2, 128, dtype=BF16), torch.arange(num), table(99, 64), weight(2, 64, 64, dtype=BF16))),
        ("unabsorb", [*put(normal(num, 4, 64, dtype=BF16), weight(4, 32, 64, dtype=BF16)), True]),
        ("mla_decode", [*put(normal(num, 1, 16, 576, dtype=BF16), cache, page_table, torch.tensor(lens).int()), 130, 512, 0.04]),
        ("gate_topk", [*put(torch.randn(num, 16), torch.randn(16)), rule, *put(testing.replicas(16))]),
        ("grouped_linear_masked", put(normal(4, num, 512, dtype=BF16), weight(4, 64, 512, dtype=BF16), torch.arange(4).int())),
        ("grouped_linear_masked", put(normal(4, num, 512, dtype=BF16), w8_experts, torch.arange(4).int())),
        ("silu_mul", [put(normal(4, num, 256, dtype=BF16))[0], True, torch.arange(4, dtype=torch.int32, device=device)]),
        ("sample", put(torch.randn(num, 1000), inputs)),
        ("logprobs", [*put(torch.randn(num, 1000), torch.arange(num)), 3]),
    ]
    x, topk, weights = put(normal(num, 64, dtype=BF16), torch.rand(num, 8).argsort(-1)[:, :3], torch.rand(num, 3))

    def step() -> None:
        for op, args in calls:
            getattr(opened.ops, op)(*args)
            getattr(composites, op)(*args)
        sent = opened.expert_comm.dispatch(Activation(x), topk, weights, ExpertStep(ExpertMode.LOW_LATENCY, num), 8)
        opened.expert_comm.combine(sent.x, weights, sent)

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with pytest.raises(RuntimeError, match="synchron"):
            topk.tolist()  # the guard works
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", list(ExpertMode))
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(0, 8, 2), (1, 8, 8), (130, 9, 4), (700, 8, 8)])
def test_quantised_rows_reach_their_experts_as_they_are(opened, mode: ExpertMode, num_tokens: int, num_experts: int, top_k: int):
    comm, device = type(opened.expert_comm)(1000), opened.runtime.device
    x, shared = normal(num_tokens, 7168, dtype=BF16), normal(num_tokens, 7168, dtype=BF16)
    topk = torch.rand(num_tokens, num_experts).argsort(-1)[:, :top_k]
    weights, quant = torch.rand(num_tokens, top_k), quantize_activation(x)
    put = lambda value: to_device(value, device)  # noqa: E731
    sent = comm.dispatch(Activation(put(x), put(quant)), put(topk), put(weights), ExpertStep(mode, num_tokens), num_experts)
    counts = sent.counts.tolist()
    starts = ExpertRows(counts, 128).starts
    assert counts == topk.flatten().bincount(minlength=num_experts).tolist()
    data, scale = sent.x.data.view(torch.uint8), sent.x.scale
    for e, count in enumerate(counts):
        first = starts[e] if sent.layout else 0
        rows = slice(first, first + count)
        got = (data[rows], scale[rows]) if sent.layout else (data[e, rows], scale[e, rows])
        mine = (topk == e).any(-1)
        assert torch.equal(got[0].cpu(), quant.data.view(torch.uint8)[mine]) and torch.equal(got[1].cpu(), quant.scale[mine]), e
        if sent.layout:
            assert first % 128 == 0 and (sent.layout.experts[rows] == e).all()
            assert (sent.layout.experts[first + count : starts[e + 1]] == -1).all()
    if sent.layout:
        assert sent.layout.ends.tolist() == starts[1:] and (sent.layout.experts[starts[-1] :] == -1).all()
    # Outputs as if each expert gave its rows back.
    y = torch.full(sent.x.shape, torch.nan, dtype=BF16, device=device)
    real = (sent.layout.experts >= 0) if sent.layout else torch.arange(y.shape[1], device=device) < sent.counts[:, None]
    y[real] = (data.view(torch.float8_e4m3fn).float() * scale.repeat_interleave(128, -1)).to(BF16)[real]
    home = comm.combine(y, put(weights), sent, put(shared))
    expected = dequantize(quant, BF16).float() * weights.sum(-1, keepdim=True) + shared.float()
    assert_close(home, expected.to(BF16), tolerance(BF16), "home")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 130, 3000])
def test_experts_that_are_elsewhere(opened, num_tokens: int, quantized: bool):
    """As over ranks: of a token's experts some are here, in exact layouts; the rest, -1, neither gets nor brings anything."""
    comm, device, num_here = opened.expert_comm, opened.runtime.device, 6
    x = normal(num_tokens, 256, dtype=BF16)
    topk = torch.rand(num_tokens, 16).argsort(-1)[:, :4]
    topk, weights = torch.where(topk < num_here, topk, -1), torch.rand(num_tokens, 4)
    quant = quantize_activation(x)
    form = Activation(to_device(x, device), to_device(quant, device) if quantized else None)
    step = ExpertStep(ExpertMode.THROUGHPUT, num_tokens)
    sent = comm.dispatch(form, topk.to(device), weights.to(device), step, num_here)
    counts = [int((topk == e).sum()) for e in range(num_here)]
    starts = ExpertRows(counts, sent.layout.align).starts
    assert sent.counts.tolist() == counts and sent.layout.ends.tolist() == starts[1:]
    rows = dequantize(sent.x, BF16) if quantized else sent.x
    y = torch.full(rows.shape, torch.nan, dtype=BF16, device=device)
    for e, (first, count) in enumerate(zip(starts, counts, strict=False)):
        y[first : first + count] = rows[first : first + count] * (e + 1)
    x = dequantize(quant, BF16) if quantized else x
    each = (x[:, None] * (topk + 1).to(BF16)[:, :, None]).float() * weights[:, :, None]
    expected = torch.where(topk[:, :, None] >= 0, each, 0.0).sum(1)
    assert_close(comm.combine(y, weights.to(device), sent).cpu(), expected.to(BF16), tolerance(BF16), "home")


def test_a_nan_from_a_broken_weight_gives_ids_in_range(opened):
    device = opened.runtime.device
    logits = torch.full((3, 1000), torch.nan, device=device)
    rule = GateRule(4, "softmax", 4, 2, "max", True, 1.0)
    idx, *_ = opened.ops.gate_topk(logits[:, :16], None, rule, to_device(testing.replicas(16), device))
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 16 for row in idx.tolist())
    none = torch.zeros(3, dtype=torch.int64, device=device)
    ones = torch.ones(3, device=device)
    for filtered in (False, True):
        inputs = SampleInputs(ones, none + 3 * filtered, ones - 0.5 * filtered, 0 * ones, none, none, none, True, filtered)
        tokens = opened.ops.sample(logits, inputs)
        assert ((tokens >= 0) & (tokens < 1000)).all()
        greedy = opened.ops.sample(logits, dataclasses.replace(inputs, any_sampled=False))
        assert ((greedy >= 0) & (greedy < 1000)).all()


def test_reference_of_a_masked_case_without_rows():
    """The twin of the tests above, on its own: no expert has a row."""
    x, w = torch.zeros(2, 4, 8), quantize_weight_blocks(torch.randn(2, 3, 8))
    assert ReferenceOps().grouped_linear_masked(x, w, torch.zeros(2, dtype=torch.int32)).shape == (2, 4, 3)


def test_layers_share_a_decode_plan(opened):
    """One schedule for several calls of a step that differ in q and cache: the bits of a schedule of its own each."""
    lens = (700, 1, 64, 1023)
    device = opened.runtime.device
    seq_lens, plan = torch.tensor(lens, dtype=torch.int32, device=device), opened.ops.decode_plan()
    for _ in range(3):
        cache, page_table = pages(lens, 64, 576, 2, BF16)
        q, cache, page_table = normal(4, 1, 128, 576, dtype=BF16).to(device), cache.to(device), page_table.to(device)
        args = (q, cache, page_table, seq_lens, max(lens), 512, 576**-0.5)
        for shared, own in zip(opened.ops.mla_decode(*args, plan, True), opened.ops.mla_decode(*args, None, True), strict=True):
            assert torch.equal(shared, own)


def test_work_beside_a_captured_path_joins_it(opened):
    """Both branches read what came before the fork, and what comes after the join reads both."""
    ops, runtime = opened.ops, opened.runtime
    x, norm, w = (normal(*shape, dtype=BF16).to(runtime.device) for shape in ((64, 512), (512,), (512, 512)))

    def step() -> torch.Tensor:
        forms, total = ops.add_rms_norm(x, x, norm, 1e-6)
        beside = runtime.beside(lambda: ops.linear(ops.silu_mul(forms.dense), w[:, :256]))
        here = total
        for _ in range(20):
            here = ops.rms_norm(here, norm, 1e-6)
        return here + beside()

    replay = runtime.capture(step)
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        assert torch.equal(replay(), step())


def test_a_captured_step_is_the_step(opened):
    """Captured work reads its buffers anew at every replay, and uploads and downloads keep their order around it."""
    runtime = opened.runtime
    buffer = runtime.zeros((64,), torch.float32)
    replay = runtime.capture(lambda: opened.ops.silu_mul(buffer.view(2, 32)).sum())
    for value in (1.0, 2.0, -3.0):
        buffer.copy_(runtime.upload(torch.full((64,), value).numpy()))
        (found,) = runtime.download([replay()])()
        expected = 32 * value * torch.nn.functional.silu(torch.tensor(value))
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
