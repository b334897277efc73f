"""Who serves which shape on which backend; no GPU is asked."""

import torch

from hw.api import ExpertMode, Ops
from hw.cuda.rules import (
    CUBLAS,
    CUTLASS,
    DECODE,
    DEEP_EP,
    DEEP_GEMM,
    DISPATCH,
    FACTS,
    FEW_ROWS,
    FLASH_MLA,
    GROUPED,
    LINEAR,
    MASKED,
    NCCL,
    PEERS,
    TRITON,
    Dispatch,
    refuses_fused,
)
from hw.quant import QuantTensor, scale_shape
from hw.rules import Decode, ModelShapes, Product, Provider, choose

BF16 = torch.bfloat16


def fp8(*shape: int) -> QuantTensor:
    scale = torch.empty(scale_shape(shape, (128, 128)), device="meta")
    return QuantTensor(torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"), scale)


def decode(latent: int = 512, dtype: torch.dtype = BF16, num_seqs: int = 64, num_heads: int = 16) -> Decode:
    return Decode(dtype, num_seqs, query_len=1, num_heads=num_heads, latent=latent, rope=64, page_size=64, max_seq_len=100)


def test_the_first_that_takes_a_shape_does_it_and_the_others_say_why_not():
    assert choose("mla_decode", DECODE, decode()) == Provider("mla_decode", FLASH_MLA)
    assert choose("mla_decode", DECODE, decode(64)) == Provider("mla_decode", TRITON, "FlashMLA: latent 64, it takes 512")
    assert choose("mla_decode", DECODE, decode(dtype=torch.float32)).served_by == TRITON
    assert choose("mla_decode", DECODE, decode(), absent=frozenset({FLASH_MLA})).reason == "FlashMLA: not there"


def test_few_sequences_with_few_heads_are_read_by_a_kernel_of_ours():
    for num_seqs, num_heads, expected in ((1, 16, TRITON), (8, 16, TRITON), (9, 16, FLASH_MLA), (1, 17, FLASH_MLA), (1, 128, FLASH_MLA)):
        shape = decode(num_seqs=num_seqs, num_heads=num_heads)
        assert choose("mla_decode", DECODE, shape).served_by == expected, shape


def test_products():
    for table, weight, dtype, expected in (
        (LINEAR, fp8(2112, 7168), BF16, DEEP_GEMM),
        (LINEAR, fp8(2112, 7168), torch.float32, CUBLAS),
        (LINEAR, fp8(2100, 7168), BF16, CUBLAS),
        (LINEAR, fp8(2112, 7100), BF16, CUBLAS),
        (LINEAR, torch.empty(2112, 7168, device="meta"), BF16, CUBLAS),
        (GROUPED, fp8(8, 4096, 7168), BF16, DEEP_GEMM),
        (GROUPED, torch.empty(8, 2816, 2048, device="meta"), BF16, CUTLASS),
        (GROUPED, torch.empty(8, 2816, 2044, device="meta"), BF16, TRITON),
        (MASKED, torch.empty(8, 2816, 2048, device="meta"), BF16, DEEP_GEMM),
        (MASKED, torch.empty(8, 64, 256, device="meta"), BF16, TRITON),
        (MASKED, fp8(8, 64, 256), BF16, DEEP_GEMM),
    ):
        assert choose("product", table, Product.of(128, dtype, weight)).served_by == expected, (table, weight.shape)


def test_products_of_few_rows():
    dense = torch.empty(64, 2816, 2048, device="meta")
    for table, weight, last_row in (
        (LINEAR, fp8(2112, 7168), 16),
        (MASKED, fp8(8, 4096, 7168), 8),
        (MASKED, dense, 128),
        (MASKED, dense[:8], 16),
    ):
        for rows, expected in ((1, FEW_ROWS), (last_row, FEW_ROWS), (last_row + 1, DEEP_GEMM)):
            assert choose("product", table, Product.of(rows, BF16, weight)).served_by == expected, (rows, weight.shape)
    for rows, dtype, weight, expected in (
        (8, BF16, dense[0], FEW_ROWS),
        (9, BF16, dense[0], CUBLAS),
        (1, BF16, dense[0, :, :100], CUBLAS),
        (1, torch.float32, dense[0], CUBLAS),
        (1, BF16, fp8(2100, 7168), CUBLAS),
    ):
        assert choose("product", LINEAR, Product.of(rows, dtype, weight)).served_by == expected, (rows, dtype, weight.shape)
    assert choose("product", MASKED, Product.of(1, BF16, torch.empty(8, 64, 256, device="meta"))).served_by == TRITON


def test_experts_of_few_tokens_in_two_kernels():
    """What their tiles divide, a warp for each expert of a token, and few tokens among many experts."""
    lite = torch.empty(64, 2816, 2048, device="meta")
    for rows, top_k, dtype, weight, why in (
        (1, 6, BF16, lite, None),
        (1, 8, BF16, lite, None),
        (2, 8, BF16, lite, None),
        (2, 9, BF16, lite, "9 experts of a token"),
        (1, 9, BF16, lite, "9 experts of a token"),
        (3, 6, BF16, lite, "so many tokens are likely to share experts"),
        (1, 1, BF16, lite[:1], None),
        (2, 1, BF16, lite[:1], "so many tokens are likely to share experts"),
        (1, 6, torch.float32, lite, "activations in torch.float32"),
        (1, 6, BF16, fp8(8, 4096, 7168), "for bf16 weights"),
        (1, 6, BF16, torch.empty(64, 2816, 2112, device="meta"), "K 2112"),
        (1, 6, BF16, torch.empty(64, 2880, 2048, device="meta"), "N 2880"),
    ):
        reason = refuses_fused(Product.of(rows, dtype, weight), top_k)
        assert reason is None if why is None else reason.startswith(why), (rows, top_k, reason)


def test_inspect_leaves_no_op_out():
    products = {"down": fp8(2112, 7168), "experts": fp8(8, 4096, 7168)}
    shapes = ModelShapes(BF16, decode(), products, top_k=8, max_rows=2048, max_low_latency_rows=128)
    named = {op for provider in FACTS.providers(shapes) for op in provider.op.split(", ")}
    computes_nothing = {"quantizes", "decode_plan", "prefers_absorbed", "fuses_experts"}
    assert named - {"dispatch", "combine"} == {name for name in vars(Ops) if not name.startswith("_")} - computes_nothing


def test_who_brings_rows_to_experts():
    for mode, dtype, hidden_size, cap, num_ranks, expected in (
        (ExpertMode.LOW_LATENCY, BF16, 7168, 256, 8, PEERS),
        (ExpertMode.LOW_LATENCY, torch.float32, 200, 4096, 2, PEERS),
        (ExpertMode.LOW_LATENCY, BF16, 7168, 16384, 8, NCCL),
        (ExpertMode.LOW_LATENCY, BF16, 201, 256, 2, NCCL),
        (ExpertMode.LOW_LATENCY, BF16, 7168, 256, 16, DEEP_EP),
        (ExpertMode.LOW_LATENCY, BF16, 7168, 512, 16, NCCL),
        (ExpertMode.THROUGHPUT, BF16, 7168, 512, 2, DEEP_EP),
        (ExpertMode.THROUGHPUT, torch.float32, 7168, 512, 2, NCCL),
    ):
        shape = Dispatch(mode, dtype, hidden_size, cap, num_ranks)
        assert choose("dispatch", DISPATCH, shape).served_by == expected, shape
