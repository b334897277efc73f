"""Which library or kernel serves which shape on a GPU. Pure: no GPU and no library is needed to ask.

"Triton" is a kernel of ours. The composites of FP8 products dequantise the weight first; their name says what they do then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from hw.api import ExpertMode
from hw.rules import Candidate, Decode, Facts, ModelShapes, Product, Provider, by_rows, choose, takes_all

FLASH_MLA, DEEP_GEMM, TRITON, CUBLAS, CUTLASS = "FlashMLA", "DeepGEMM", "Triton", "cuBLAS", "CUTLASS"
FEW_ROWS = "Triton for few rows"
PEERS, ELASTIC, DEEP_EP, NCCL = "peer memory", "DeepEP ElasticBuffer", "DeepEP", "NCCL"

# What FlashMLA's dense decode is compiled for.
FLASH_LATENT, FLASH_ROPE, FLASH_PAGE = 512, 64, 64
# Most sequences, and most queries times heads of each, for which our kernel beats FlashMLA's.
FEW_SEQUENCES, FEW_QUERIES = 8, 16
# Elements of an expert's matrix from which DeepGEMM's masked bf16 product is worth compiling.
LARGE_WEIGHT = 1 << 20
# Most rows for which kernels of ours that read the weight at full speed beat DeepGEMM's: of `linear`, and of each expert. The first number
# is that of the kernel whose warps cut K; the second that of the one whose programs do. FEW_ROWS_DENSE: of `linear` in bf16.
WARPS_CUT_K_MOST_ROWS, FEW_ROWS_LINEAR, FEW_ROWS_EXPERT, FEW_ROWS_DENSE = 8, 16, 16, 8
# Most channels for which a kernel takes a row at once.
MOST_AT_ONCE = 8192

# Of experts in two kernels: most of a token, and how many times as many experts as (token, expert) pairs there must be.
MOST_FUSED_TOP_K, FUSED_SPREAD = 8, 4

# What DeepEP's low-latency kernels are compiled for, and the tokens of a rank, in whole tiles, that its send queues of 511 hold.
DEEP_EP_WIDTHS, DEEP_EP_MOST_TOKENS = (2048, 2560, 4096, 5120, 6144, 7168, 8192), 384
# Most ranks that write straight to each other's memory in low-latency steps: those of one host. And most rows that an expert may get then.
PEERS_MOST_RANKS, PEERS_MOST_ROWS = 8, 1 << 16

# Most tokens for which one kernel beats a product of cuBLAS and a pass beside it: the query's rotation, or the output's quantisation.
ABSORB_MOST_ROWS, UNABSORB_MOST_ROWS = 64, 256


@dataclass(frozen=True)
class Absorb:
    """Shape of `absorb_query` and `unabsorb`."""

    dtype: torch.dtype
    rows: int  # tokens


@dataclass(frozen=True)
class Dispatch:
    """Shape of what travels to experts on other ranks."""

    mode: ExpertMode
    dtype: torch.dtype
    hidden_size: int
    tokens_per_rank: int  # cap of the low-latency mode
    num_ranks: int


def _peers(shape: Dispatch) -> str | None:
    if shape.mode is not ExpertMode.LOW_LATENCY:
        return "for low-latency steps"
    if shape.num_ranks > PEERS_MOST_RANKS:
        return f"{shape.num_ranks} ranks, a host has up to {PEERS_MOST_RANKS}"
    if shape.hidden_size * shape.dtype.itemsize % 4:
        return f"hidden size {shape.hidden_size} in {shape.dtype}, it copies 4 bytes at a time"
    rows = shape.num_ranks * shape.tokens_per_rank
    return f"{rows} rows an expert may get, it numbers {PEERS_MOST_ROWS}" if rows > PEERS_MOST_ROWS else None


def _elastic(shape: Dispatch) -> str:
    return "of DeepEP 2, which needs NCCL 2.30.4 or newer; torch 2.11, for which the kernel libraries are built, has 2.28"


def _deep_ep(shape: Dispatch) -> str | None:
    if shape.dtype != torch.bfloat16:
        return f"rows in {shape.dtype}, it takes {torch.bfloat16}"
    if shape.hidden_size not in DEEP_EP_WIDTHS:
        return f"hidden size {shape.hidden_size}, it takes {', '.join(map(str, DEEP_EP_WIDTHS))}"
    if shape.mode is ExpertMode.LOW_LATENCY and shape.tokens_per_rank > DEEP_EP_MOST_TOKENS:
        return f"{shape.tokens_per_rank} tokens of a rank in low-latency steps, its queues hold {DEEP_EP_MOST_TOKENS}"
    return None


def _flash_mla(shape: Decode) -> str | None:
    for name, value, wanted in (
        ("latent", shape.latent, FLASH_LATENT),
        ("rope", shape.rope, FLASH_ROPE),
        ("page size", shape.page_size, FLASH_PAGE),
        ("dtype", shape.dtype, torch.bfloat16),
    ):
        if value != wanted:
            return f"{name} {value}, it takes {wanted}"
    # It works on 64 queries times heads of a sequence at a time, and takes a while to begin.
    if shape.num_seqs <= FEW_SEQUENCES and shape.query_len * shape.num_heads <= FEW_QUERIES:
        return f"at most {FEW_SEQUENCES} sequences of at most {FEW_QUERIES} queries times heads, for which it is slower"
    return None


def _deep_gemm_fp8(shape: Product) -> str | None:
    if shape.block is None:
        return "for FP8 weights"
    if shape.dtype != torch.bfloat16:
        return f"activations in {shape.dtype}, it takes {torch.bfloat16}"
    if shape.block != (128, 128):
        return f"blocks of {shape.block[0]} x {shape.block[1]}, it takes 128 x 128"
    if shape.inner % 128:
        return f"K {shape.inner} is no multiple of 128"
    return f"N {shape.outer} is no multiple of 64" if shape.outer % 64 else None


def _few_rows_linear(shape: Product) -> str | None:
    most = FEW_ROWS_DENSE if shape.block is None else FEW_ROWS_LINEAR
    if shape.block is not None:
        reason = _deep_gemm_fp8(shape)
    elif shape.dtype != torch.bfloat16:
        reason = f"activations in {shape.dtype}, it takes {torch.bfloat16}"
    else:
        odd = shape.inner % 128 or shape.inner > MOST_AT_ONCE
        reason = f"K {shape.inner} is no multiple of 128 up to {MOST_AT_ONCE}" if odd else None
    return reason or (f"more than {most} rows" if shape.rows > most else None)


def _few_rows_masked(shape: Product) -> str | None:
    """The bf16 product counts on rows that spread over the experts: with 8 experts a token, capacity 2 E gives 16 rows to each."""
    if shape.block is not None:
        reason, most = _deep_gemm_fp8(shape), WARPS_CUT_K_MOST_ROWS
    else:
        reason = _deep_gemm_masked(shape)
        most = max(FEW_ROWS_EXPERT, min(8 * FEW_ROWS_EXPERT, 2 * (shape.experts or 1)))
    return reason or (f"more than {most} rows an expert" if shape.rows > most else None)


def _deep_gemm_masked(shape: Product) -> str | None:
    if shape.block is not None:
        return _deep_gemm_fp8(shape)
    if shape.dtype != torch.bfloat16:
        return f"activations in {shape.dtype}, it takes {torch.bfloat16}"
    for name, value in (("N", shape.outer), ("K", shape.inner)):
        if value % 64:
            return f"{name} {value} is no multiple of 64"
    small = shape.outer * shape.inner < LARGE_WEIGHT
    return f"{shape.outer} x {shape.inner} is too small to be worth compiling" if small else None


def _cutlass_grouped(shape: Product) -> str | None:
    if shape.dtype != torch.bfloat16:
        return f"activations in {shape.dtype}, it takes {torch.bfloat16}"
    for name, value in (("N", shape.outer), ("K", shape.inner)):
        if value % 8:
            return f"{name} {value} is no multiple of 8"
    return None


def refuses_fused(shape: Product, top_k: int) -> str | None:
    """Why `fused_gate_up` is not for so many tokens; shape: that of their products with the first matrices of experts."""
    reason = "for bf16 weights; with FP8 ones it is no faster" if shape.block is not None else None
    if shape.dtype != torch.bfloat16:
        reason = reason or f"activations in {shape.dtype}, it takes {torch.bfloat16}"
    for name, value in (("K", shape.inner), ("N", shape.outer)):
        if value % 128:
            reason = reason or f"{name} {value} is no multiple of 128"
    if top_k > MOST_FUSED_TOP_K:
        reason = reason or f"{top_k} experts of a token, it has a warp for each of at most {MOST_FUSED_TOP_K}"
    # Every token reads its experts by itself, which pays while few of them are the same.
    crowded = shape.rows > 1 and FUSED_SPREAD * shape.rows * top_k > (shape.experts or 1)
    return reason or ("so many tokens are likely to share experts" if crowded else None)


def _tokens_up_to(most: int, shape: Absorb) -> str | None:
    if shape.dtype != torch.bfloat16:
        return f"activations in {shape.dtype}, it takes {torch.bfloat16}"
    return f"more than the {most} tokens up to which it is faster" if shape.rows > most else None


ABSORB = (Candidate(TRITON, partial(_tokens_up_to, ABSORB_MOST_ROWS)), Candidate(CUBLAS, takes_all))
UNABSORB = (Candidate(TRITON, partial(_tokens_up_to, UNABSORB_MOST_ROWS)), Candidate(CUBLAS, takes_all))
DECODE = (Candidate(FLASH_MLA, _flash_mla), Candidate(TRITON, takes_all))
LINEAR = (Candidate(FEW_ROWS, _few_rows_linear), Candidate(DEEP_GEMM, _deep_gemm_fp8), Candidate(CUBLAS, takes_all))
GROUPED = (Candidate(DEEP_GEMM, _deep_gemm_fp8), Candidate(CUTLASS, _cutlass_grouped), Candidate(TRITON, takes_all))
DISPATCH = (Candidate(PEERS, _peers), Candidate(ELASTIC, _elastic), Candidate(DEEP_EP, _deep_ep), Candidate(NCCL, takes_all))
MASKED = (Candidate(FEW_ROWS, _few_rows_masked), Candidate(DEEP_GEMM, _deep_gemm_masked), Candidate(TRITON, takes_all))
# Who takes block-FP8 weights as they are.
TAKES_FP8 = frozenset({FEW_ROWS, DEEP_GEMM})
# Ops that one does whatever the shape.
FIXED = {
    "rms_norm, add_rms_norm, rope, silu_mul": TRITON,
    "latent_write, latent_gather": TRITON,
    "mla_prefill, merge_attention": TRITON,
    "expand_latent": f"{CUBLAS}, {TRITON}",
    "gate_logits, gate_topk": TRITON,
    "sample, penalize, logprobs": TRITON,
}


def compute_dtype(checkpoint_dtype: str) -> str:
    return "float32" if checkpoint_dtype == "float32" else "bfloat16"


def product_provider(op: str, candidates: tuple[Candidate, ...], shape: Product) -> Provider:
    """Who does it; where nobody takes the FP8 weight, who does it once that is dequantised."""
    provider = choose(op, candidates, shape)
    if shape.block is None or provider.served_by in TAKES_FP8:
        return provider
    library = choose(op, candidates, replace(shape, block=None)).served_by
    return replace(provider, served_by=f"dequantised, then {library}")


def providers(model: ModelShapes) -> list[Provider]:
    """Every op of `hw.api` for this model, and why others do not do it."""
    d = model.decode
    found = list(
        by_rows(
            lambda num: choose("mla_decode", DECODE, replace(d, num_seqs=num)), f"{d.num_heads} heads, latent {d.latent} + rope {d.rope}"
        )
    )
    for op, table in (("absorb_query", ABSORB), ("unabsorb", UNABSORB)):
        found += by_rows(lambda rows, op=op, table=table: choose(op, table, Absorb(model.dtype, rows)), f"{d.num_heads} heads")
    for role, weight in model.products.items():
        label = f"{role} {' x '.join(map(str, weight.shape))}"
        tables = (("linear", LINEAR),) if len(weight.shape) == 2 else (("grouped_linear", GROUPED), ("grouped_linear_masked", MASKED))
        for op, table in tables:
            found += by_rows(
                lambda rows, op=op, table=table, weight=weight: product_provider(op, table, Product.of(rows, model.dtype, weight)), label
            )
    found += [*_fused(model), *_between_ranks(model)]
    return found + [Provider(op, library, shape="all") for op, library in FIXED.items()]


def _fused(model: ModelShapes) -> Iterator[Provider]:
    """Experts of few tokens where they lie."""
    ranks = f"experts are on {model.num_ranks} ranks" if model.num_ranks > 1 else None
    table = (
        Candidate(FEW_ROWS, lambda shape: ranks or refuses_fused(shape, model.top_k)),
        Candidate("dispatch, grouped products and combine", takes_all),
    )
    for weight in model.products.values():
        if len(weight.shape) == 3:
            label = " x ".join(map(str, weight.shape))
            yield from by_rows(
                lambda rows, weight=weight: choose("fused_gate_up, fused_down", table, Product.of(rows, model.dtype, weight)), label
            )


def _between_ranks(model: ModelShapes) -> list[Provider]:
    """Collectives, and the way to experts and back."""
    if model.num_ranks == 1:
        return [Provider("dispatch, combine", TRITON, shape="all")]
    found = [Provider("collectives", NCCL, shape="all")]
    hidden_size = next((weight.shape[2] for weight in model.products.values() if len(weight.shape) == 3), None)
    for mode in ExpertMode if hidden_size is not None else ():
        shape = Dispatch(mode, model.dtype, hidden_size, model.max_low_latency_rows, model.num_ranks)
        found.append(replace(choose("dispatch, combine", DISPATCH, shape), shape=f"{mode.value.replace('_', ' ')} steps"))
    return found


FACTS = Facts(
    keeps_fp8=True,
    compute_dtype=compute_dtype,
    providers=providers,
    needs_all_ranks="kernels that bring rows to experts wait for all ranks, and going on without one has not been tried",
)
