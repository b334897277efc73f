"""Attention by the kernels of `csrc/attention.cpp`, and the products of single heads around it. A mixin like `NativeProducts`."""

from itertools import accumulate

import torch

from hw.api import Segments
from hw.cpu.native_products import NativeProducts, takes
from hw.quant import quantize_activation


class NativeAttention(NativeProducts):
    """See `hw.api.Ops`. What a query gets does not depend on the other queries, whichever mode the ops below are for."""

    def absorb_query(self, q, positions, table, w_uk):
        if not takes(q, w_uk):
            return super().absorb_query(q, positions, table, w_uk)
        num_heads, nope, latent = w_uk.shape
        out = torch.empty(q.shape[0], num_heads, latent + q.shape[2] - nope, dtype=q.dtype)
        self._heads(q[..., :nope], w_uk, out[..., :latent], by_inner=True)
        self.rope(q[..., nope:], positions, table, out=out[..., latent:])
        return out

    def unabsorb(self, out, w_uv, quant=False):
        if not takes(out, w_uv):
            return super().unabsorb(out, w_uv, quant)
        values = torch.empty(*out.shape[:2], w_uv.shape[1], dtype=out.dtype)
        self._heads(out, w_uv, values, by_inner=False)
        return quantize_activation(values.flatten(1)) if quant else values.flatten(1)

    def expand_latent(self, latent, key, kv_up, nope):
        if not takes(latent, kv_up) or self.left_to_torch(latent.dtype, latent.shape[0]):
            return super().expand_latent(latent, key, kv_up, nope)
        num_rows, num_heads = latent.shape[0], kv_up.shape[0]
        keys = torch.empty(num_rows, num_heads, nope + key.shape[1], dtype=latent.dtype)
        values = torch.empty(num_rows, num_heads, kv_up.shape[1] - nope, dtype=latent.dtype)
        self._heads(latent, kv_up[:, :nope], keys[..., :nope], by_inner=False)
        keys[..., nope:] = key[:, None]
        self._heads(latent, kv_up[:, nope:], values, by_inner=False)
        return keys, values

    def mla_decode(self, q, cache, page_table, seq_lens, max_seq_len, kv_lora_rank, scale, plan=None, with_lse=False):
        if not takes(q, cache):
            return super().mla_decode(q, cache, page_table, seq_lens, max_seq_len, kv_lora_rank, scale, plan, with_lse)
        q = q.contiguous()
        num_seqs, q_len, num_heads, dim = q.shape
        out = torch.empty(num_seqs, q_len, num_heads, kv_lora_rank, dtype=q.dtype)
        lse = torch.empty(num_seqs, q_len, num_heads) if with_lse else None
        self.kernels.mla_decode(
            q.dtype is torch.bfloat16, q.data_ptr(), cache.data_ptr(), page_table.data_ptr(), page_table.stride(0), seq_lens.data_ptr(),
            num_seqs, q_len, num_heads, dim, kv_lora_rank, cache.shape[1], scale, out.data_ptr(), None if lse is None else lse.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out, lse

    def mla_prefill(self, q, k, v, q_segments: Segments, k_segments: Segments, scale, causal):
        if not takes(q, k, v) or q.shape[2] * q.itemsize % 4:
            return super().mla_prefill(q, k, v, q_segments, k_segments, scale, causal)
        num_heads, key_dim, value_dim = q.shape[1], q.shape[2], v.shape[2]
        out = torch.empty(q.shape[0], num_heads, value_dim, dtype=q.dtype)
        lse = torch.empty(q.shape[0], num_heads)
        starts = torch.tensor([[0, *accumulate(some.lens)] for some in (q_segments, k_segments)], dtype=torch.int64)
        self.kernels.mla_prefill(
            q.dtype is torch.bfloat16, q.data_ptr(), q.stride(0), q.stride(1), k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(),
            v.stride(0), v.stride(1), starts[0].data_ptr(), starts[1].data_ptr(), len(q_segments.lens), num_heads, key_dim, value_dim,
            scale, causal, out.data_ptr(), lse.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out, lse
