"""Which library or kernel serves which shape on a GPU. Pure: no GPU and no library is needed to ask.

"Triton" is a kernel of ours. The composites of FP8 products dequantise the weight first; their name says what they do then.
"""

import torch

from hw.rules import Candidate, Decode, Product, takes_all

FLASH_MLA, DEEP_GEMM, TRITON, CUBLAS, CUTLASS = "FlashMLA", "DeepGEMM", "Triton", "cuBLAS", "CUTLASS"

# What FlashMLA's dense decode is compiled for.
FLASH_LATENT, FLASH_ROPE, FLASH_PAGE = 512, 64, 64
# Elements of an expert's matrix from which DeepGEMM's masked bf16 product is worth compiling.
LARGE_WEIGHT = 1 << 20


def _flash_mla(shape: Decode) -> str | None:
    for name, value, wanted in (
        ("latent", shape.latent, FLASH_LATENT),
        ("rope", shape.rope, FLASH_ROPE),
        ("page size", shape.page_size, FLASH_PAGE),
        ("dtype", shape.dtype, torch.bfloat16),
    ):
        if value != wanted:
            return f"{name} {value}, it takes {wanted}"
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


DECODE = (Candidate(FLASH_MLA, _flash_mla), Candidate(TRITON, takes_all))
LINEAR = (Candidate(DEEP_GEMM, _deep_gemm_fp8), Candidate(CUBLAS, takes_all))
GROUPED = (Candidate(DEEP_GEMM, _deep_gemm_fp8), Candidate(CUTLASS, _cutlass_grouped), Candidate(TRITON, takes_all))
MASKED = (Candidate(DEEP_GEMM, _deep_gemm_masked), Candidate(TRITON, takes_all))
