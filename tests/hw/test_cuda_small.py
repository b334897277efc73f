"""Kernels for small batches on a GPU: products of few rows, the gate's product, latent attention of few sequences."""

import pytest
import torch

from hw.api import Activation, ExpertMode, ExpertStep
from hw.quant import QuantTensor, dequantize, quantize_activation, quantize_weight_blocks
from hw.select import open_backend
from hw.testing import assert_close, available_backends, tolerance
from tests.hw.op_calls import Call, normal, pages, some_experts, weight
from tests.hw.test_parity import check, to_device

pytestmark = pytest.mark.skipif("cuda" not in available_backends(), reason="needs an NVIDIA GPU")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def opened():
    return open_backend("cuda")


def quantized_product(x: torch.Tensor, w: QuantTensor) -> torch.Tensor:
    """What FP8 means: both sides quantised, the product of their values in fp32."""
    return (dequantize(quantize_activation(x)) @ dequantize(w).T).to(x.dtype)


@pytest.mark.parametrize(("outer", "inner"), [(2112, 7168), (576, 512), (192, 128), (4096, 1536)])
def test_fp8_products_of_few_rows(opened, outer: int, inner: int):
    """Each row count takes the kernel that its shape is given, so together they see every tile there is."""
    w = quantize_weight_blocks(weight(outer, inner, dtype=torch.float32))
    there = to_device(w, opened.runtime.device)
    for num_rows in (1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 100, 128, 129):
        x = normal(num_rows, inner, dtype=BF16)
        actual = opened.ops.linear(x.to(opened.runtime.device), there)
        assert_close(actual, quantized_product(x, w), tolerance(BF16), f"{num_rows} rows")
        # Rows whose scales lie row by row.
        again = opened.ops.linear(to_device(quantize_activation(x), opened.runtime.device), there)
        assert_close(again, quantized_product(x, w), tolerance(BF16), f"{num_rows} rows, quantised elsewhere")


@pytest.mark.parametrize(("outer", "inner"), [(3648, 2048), (100, 2816), (5000, 128), (64, 192)])
def test_bf16_products_of_few_rows(opened, outer: int, inner: int):
    w = weight(outer, inner, dtype=torch.float32).to(BF16)
    there = w.to(opened.runtime.device)
    for num_rows in (1, 2, 3, 4, 5, 8, 9):
        x = normal(num_rows, inner + 8, dtype=BF16)[:, :inner]  # rows with gaps
        actual = opened.ops.linear(to_device(x, opened.runtime.device), there)
        assert_close(actual, (x.float() @ w.float().T).to(BF16), tolerance(BF16), f"{num_rows} rows")


def test_experts_of_few_tokens_in_two_kernels(opened):
    """V2-Lite's widths, against the way by dispatch, masked products and combine."""
    ops, device, (num_experts, top_k, inner, hidden) = opened.ops, opened.runtime.device, (16, 6, 1408, 2048)
    gate_up, down = (weight(num_experts, *shape, dtype=BF16).to(device) for shape in ((2 * inner, hidden), (hidden, inner)))
    assert ops.fuses_experts(1, top_k, gate_up, BF16) and not ops.fuses_experts(3, top_k, gate_up, BF16)
    for num in (1, 3):
        x, shared = (normal(num, hidden, dtype=BF16).to(device) for _ in range(2))
        topk, shares = some_experts(num, num_experts, top_k).to(device), torch.rand(num, top_k, device=device)
        actual = ops.fused_down(ops.fused_gate_up(x, topk, gate_up), topk, shares, down, shared)
        sent = opened.expert_comm.dispatch(Activation(x), topk, shares, ExpertStep(ExpertMode.LOW_LATENCY, num), num_experts)
        inner_rows = ops.silu_mul(ops.grouped_linear_masked(sent.x, gate_up, sent.counts), False, sent.counts)
        expected = opened.expert_comm.combine(ops.grouped_linear_masked(inner_rows, down, sent.counts), shares, sent, shared)
        assert_close(actual, expected, tolerance(BF16), f"{num} tokens")


@pytest.mark.parametrize("num_heads", [16, 128])
def test_values_from_attended_latents(opened, num_heads: int):
    """Each token count takes the tiles that its shape is given."""
    w_uv = weight(num_heads, 128, 512, dtype=BF16)
    for num_tokens in (1, 32, 33, 64, 65, 129):
        for quant in (False, True):
            call = Call((normal(num_tokens, num_heads, 512, dtype=BF16), w_uv, quant))
            check(opened.ops, "unabsorb", f"{num_tokens} tokens, quantised {quant}", call, opened.runtime.device)


@pytest.mark.parametrize("counts", [(1,), (0, 1, 0), (2, 0, 1, 3), (4, 4, 4), (8, 1, 0, 5, 7), (16, 3, 0)])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_products_of_experts_with_few_rows(opened, fp8: bool, counts: tuple[int, ...]):
    outer, inner, capacity, device = 2048, 768, max(counts), opened.runtime.device
    dense = weight(len(counts), outer, inner, dtype=torch.float32)
    w = quantize_weight_blocks(dense) if fp8 else dense.to(BF16)
    x = normal(len(counts), capacity, inner, dtype=BF16)
    x[torch.arange(capacity) >= torch.tensor(counts)[:, None]] = torch.nan
    there = torch.tensor(counts, dtype=torch.int32, device=device)
    actual = opened.ops.grouped_linear_masked(x.to(device), to_device(w, device), there).cpu()
    for e, count in enumerate(counts):
        rows = x[e, :count]
        expected = quantized_product(rows, w.expert(e)) if fp8 else (rows.float() @ w[e].float().T).to(BF16)
        assert_close(actual[e, :count], expected, tolerance(BF16), f"{counts}, expert {e}")


def test_every_launch_is_of_the_form_that_its_arguments_take(opened):
    """Rows that begin at 16 bytes and rows that do not, widths of and beside multiples of 16, and each again when its form is known."""
    for width in (64, 40, 1, 64):
        for offset in (0, 1, 0):
            x = normal(3, 2 * width + 8, dtype=BF16)[:, offset : offset + 2 * width]
            check(opened.ops, "silu_mul", f"width {width} from {offset}", Call((x,)), opened.runtime.device)


@pytest.mark.parametrize("num_experts", [8, 64, 256])
def test_gate_logits_are_those_of_fp32(opened, num_experts: int):
    """Against fp64: the error stays below 2^-20 of the sum of the products' magnitudes, whatever the number of rows."""
    device = opened.runtime.device
    w = weight(num_experts, 7168, dtype=torch.float32)
    w[0, :128] *= 1e-3  # parts of very different size
    w = w.to(device)
    for num_rows in (1, 2, 16, 17, 128, 256, 1000):
        x = normal(num_rows, 7168, dtype=BF16).to(device)
        exact, size = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
        error = ((opened.ops.gate_logits(x, w).double() - exact).abs() / size).max().item()
        assert error < 2**-20, f"{num_rows} rows: {error:.1e}"


@pytest.mark.parametrize(("num_heads", "query_len"), [(128, 1), (128, 3), (16, 1), (20, 2)])
@pytest.mark.parametrize("library", [True, False], ids=["flash-mla", "triton"])
def test_decode_of_few_sequences(opened, library: bool, num_heads: int, query_len: int):
    """With the library, shapes on both sides of the border between it and our kernel; without it, all are ours."""
    ops = opened.ops if library else type(opened.ops)(flash_mla=None, deep_gemm=None)
    for lens in ((4000,), (1,), (700, 0), (64, 65, 63, 1000, 5)):
        cache, page_table = pages(lens, 64, 576, 2, BF16)
        q = normal(len(lens), query_len, num_heads, 576, dtype=BF16)
        for bound in (max(lens), 20_000):
            args = (q, cache, page_table, torch.tensor(lens, dtype=torch.int32), bound, 512, 576**-0.5, None, True)
            check(ops, "mla_decode", f"{lens} of at most {bound}", Call(args), opened.runtime.device)


def test_what_a_page_holds_beyond_its_sequence_does_not_matter_to_our_decode(opened):
    ops, device = type(opened.ops)(flash_mla=None, deep_gemm=None), opened.runtime.device
    lens = (130, 1, 64)
    cache, page_table = pages(lens, 64, 576, 2, BF16)
    rest = (normal(3, 1, 16, 576, dtype=BF16), cache, page_table, torch.tensor(lens, dtype=torch.int32))
    clean = ops.mla_decode(*(arg.to(device) for arg in rest), 200, 512, 576**-0.5, None, True)
    for row, length in enumerate(lens):
        if length % 64:
            cache[page_table[row, length // 64], length % 64 :] = torch.nan
    for poisoned, expected in zip(ops.mla_decode(*(arg.to(device) for arg in rest), 200, 512, 576**-0.5, None, True), clean, strict=True):
        assert torch.equal(poisoned, expected)
