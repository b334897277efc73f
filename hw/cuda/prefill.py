"""Attention of prompts: a kernel for Hopper where the shape fits it, one for every other shape, and the join of partial results."""

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from hw.api import Segments
from hw.cuda.elementwise import num_warps
from hw.cuda.gluon_prefill import BLOCK_M, BLOCK_N, KEY_DIM, VALUE_DIM, hopper_prefill_kernel
from hw.cuda.launch import cdiv, power_of_2
from hw.cuda.triton_prefill import merge_kernel, prefill_kernel

_SWIZZLED = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class PrefillOps:
    """See `hw.api.Ops`."""

    def mla_prefill(self, q, k, v, q_segments: Segments, k_segments: Segments, scale, causal):
        num_tokens, num_heads, key_dim = q.shape
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1 and q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
        out = torch.empty((num_tokens, num_heads, v.shape[2]), dtype=q.dtype, device=q.device)
        lse = torch.empty((num_tokens, num_heads), device=q.device)
        if num_tokens:
            longest = max(q_segments.lens)
            # Few queries would leave most of the Hopper kernel's tiles empty.
            fits = (q.dtype, key_dim, v.shape[2]) == (torch.bfloat16, KEY_DIM, VALUE_DIM) and longest > BLOCK_M // 2
            run = _hopper if fits and all(_bulk_copies(x) for x in (q, k, v)) else _general
            run(q, k, v, q_segments, k_segments, scale, causal, longest, out, lse)
        return out, lse

    def merge_attention(self, out_a, lse_a, out_b, lse_b):
        out_a, lse_a, out_b, lse_b = (x.contiguous() for x in (out_a, lse_a, out_b, lse_b))
        out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
        if out.numel():
            block = power_of_2(out.shape[-1])
            merge_kernel[(lse.numel(),)](
                out_a, lse_a, out_b, lse_b, out, lse, out.shape[-1], BLOCK=block, num_warps=num_warps(block)
            )  # fmt: skip
        return out, lse


def prefill_blocks(dtype: torch.dtype, longest: int) -> dict[str, int]:
    """Tile sizes of the general kernel for at most `longest` queries a sequence."""
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    block_m = 16 if longest <= 16 else 64 if longest <= 64 else 128
    return {"BLOCK_M": block_m, "BLOCK_N": 64, "num_warps": 8 if block_m == 128 else 4, "num_stages": 3 if block_m == 128 else 2}


def _bulk_copies(x: torch.Tensor) -> bool:
    """Whether the copy engine takes x `[S, H, d]` as a matrix: rows without gaps that start at 16 bytes, something there."""
    return x.numel() > 0 and x.stride(1) == x.shape[2] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def _hopper(q, k, v, q_segments: Segments, k_segments: Segments, scale: float, causal: bool, longest: int, out, lse) -> None:
    def box(x: torch.Tensor, rows: int, columns: int) -> SharedDescriptor:
        return SharedDescriptor.from_tensor(x.view(x.shape[0], -1), [rows, columns], _SWIZZLED)

    wide, rest = VALUE_DIM, KEY_DIM - VALUE_DIM
    num_heads, num_seqs = q.shape[1], len(q_segments.lens)
    num_places = q.shape[0] // BLOCK_M + num_seqs
    num_tiles = num_heads * num_places
    num_programs = min(num_tiles, torch.cuda.get_device_properties(q.device).multi_processor_count)
    hopper_prefill_kernel[(num_programs,)](
        box(q, BLOCK_M // 2, wide), box(q, BLOCK_M // 2, rest), box(k, BLOCK_N, wide), box(k, BLOCK_N, rest), box(v, BLOCK_N, wide),
        out, lse, q_segments.starts, k_segments.starts, num_heads, num_seqs, num_places, num_tiles, scale, CAUSAL=causal, num_warps=4,
    )  # fmt: skip


def _general(q, k, v, q_segments: Segments, k_segments: Segments, scale: float, causal: bool, longest: int, out, lse) -> None:
    num_heads, key_dim, value_dim = q.shape[1], q.shape[2], v.shape[2]
    # The key dim in two parts: the largest power of two within it, and what is left.
    part_a = max(16, 1 << (key_dim.bit_length() - 1))
    part_b = 0 if key_dim <= part_a else max(16, power_of_2(key_dim - part_a))
    part_v = max(16, power_of_2(value_dim))
    blocks = prefill_blocks(q.dtype, longest)
    exact = part_a + part_b == key_dim and part_v == value_dim
    tma = exact and q.dtype == torch.bfloat16 and all(_bulk_copies(x) for x in (k, v))
    sources = (k, k, v)
    if tma:
        widths = (part_a, part_b or part_a, part_v)
        sources = tuple(
            TensorDescriptor.from_tensor(x.view(x.shape[0], -1), [blocks["BLOCK_N"], width])
            for x, width in zip(sources, widths, strict=True)
        )
    prefill_kernel[(cdiv(longest, blocks["BLOCK_M"]), num_heads, len(q_segments.lens))](
        q, *sources, q_segments.starts, k_segments.starts, out, lse, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), num_heads, key_dim, value_dim, scale,
        CAUSAL=causal, TMA=tma, BLOCK_A=part_a, BLOCK_B=part_b, BLOCK_V=part_v, **blocks,
    )  # fmt: skip
