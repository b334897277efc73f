"""Routed experts of few tokens in two kernels, and how these are cut. Sizes are those that an H200 liked best."""

import torch

from hw.cuda.launch import power_of_2
from hw.cuda.rules import refuses_fused
from hw.cuda.triton_fused_experts import down_kernel, gate_up_kernel
from hw.rules import Product

_BLOCK_N = 16  # weight rows of a program, divides whatever `refuses_fused` lets through


class FusedExpertOps:
    """See `hw.api.Ops`."""

    def fuses_experts(self, num_tokens, top_k, gate_up, dtype):
        return refuses_fused(Product.of(num_tokens, dtype, gate_up), top_k) is None

    def fused_gate_up(self, x, topk_phy, gate_up):
        (num_tokens, hidden), top_k, inner = x.shape, topk_phy.shape[1], gate_up.shape[1] // 2
        assert topk_phy.is_contiguous() and gate_up.is_contiguous() and x.stride(1) == 1, (topk_phy.stride(), gate_up.stride(), x.stride())
        out = torch.empty((num_tokens, top_k, inner), dtype=x.dtype, device=x.device)
        split = 4 if hidden % 512 == 0 else 1
        if num_tokens:
            gate_up_kernel[(inner // _BLOCK_N, num_tokens * top_k)](
                x, topk_phy, gate_up, out, inner, hidden, x.stride(0),
                TOP_K=top_k, SPLIT=split, BLOCK_N=_BLOCK_N, BLOCK_K=128, num_warps=split, num_stages=3,
            )  # fmt: skip
        return out

    def fused_down(self, inner, topk_phy, topk_weight, down, shared):
        (num_tokens, top_k, width), hidden = inner.shape, down.shape[1]
        tensors = (inner, topk_phy, topk_weight, down, *(() if shared is None else (shared,)))
        assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]
        out = torch.empty((num_tokens, hidden), dtype=inner.dtype, device=inner.device)
        warps = power_of_2(top_k)  # one for each expert
        if num_tokens:
            down_kernel[(hidden // _BLOCK_N, num_tokens)](
                inner, topk_phy, topk_weight, down, shared, out, hidden, width,
                HAS_SHARED=shared is not None, TOP_K=top_k, K_BLOCK=warps, BLOCK_N=_BLOCK_N, BLOCK_K=128 if width % 128 == 0 else 64,
                num_warps=warps, num_stages=4,
            )  # fmt: skip
        return out
