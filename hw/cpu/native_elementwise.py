"""Norms, rotation, cache write and draws: `csrc/elementwise.cpp` and `csrc/sampling.cpp`. A mixin like `NativeProducts`."""

import torch

from hw.api import Activation, SampleInputs
from hw.cpu.native import Kernels
from hw.cpu.native_products import takes
from hw.quant import quantize_activation


class NativeElementwise:
    """See `hw.api.Ops`. Each row is worked out by itself, so these serve the invariant mode too."""

    kernels: Kernels

    def rms_norm(self, x, weight, eps):
        return self._norm(x, None, weight, eps)[0] if takes(x, weight) else super().rms_norm(x, weight, eps)

    def add_rms_norm(self, x, residual, weight, eps, dense=True, quant=False):
        if not takes(x, residual, weight):
            return super().add_rms_norm(x, residual, weight, eps, dense, quant)
        normed, total = self._norm(x, residual.contiguous(), weight, eps)
        return Activation(normed if dense else None, quantize_activation(normed) if quant else None), total

    def _norm(self, x, residual, weight, eps):
        x = x.contiguous()
        dim, normed = x.shape[-1], torch.empty_like(x)
        total = None if residual is None else torch.empty_like(x)
        self.kernels.add_rms_norm(
            x.dtype is torch.bfloat16, x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), eps,
            x.numel() // dim, dim, normed.data_ptr(), None if total is None else total.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return normed, total

    def rope(self, x, positions, table, out=None):
        if not takes(x):
            return super().rope(x, positions, table, out)
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype)
        self.kernels.rope(
            x.dtype is torch.bfloat16, x.data_ptr(), x.stride(0), x.stride(1), positions.data_ptr(), table.data_ptr(), *x.shape,
            out.data_ptr(), out.stride(0), out.stride(1), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def latent_write(self, down, q_norm, kv_norm, eps, positions, table, cache, slots, quant=False):
        if not takes(down, kv_norm, cache):
            return super().latent_write(down, q_norm, kv_norm, eps, positions, table, cache, slots, quant)
        down = down.contiguous()
        num_rows, latent, rope = down.shape[0], kv_norm.shape[0], table.shape[1]
        q = None if q_norm is None else torch.empty(num_rows, q_norm.shape[0], dtype=down.dtype)
        entries = torch.empty(num_rows, latent + rope, dtype=down.dtype)
        self.kernels.latent_write(
            down.dtype is torch.bfloat16, down.data_ptr(), num_rows, None if q is None else q_norm.data_ptr(),
            0 if q is None else q.shape[1], kv_norm.data_ptr(), latent, rope, eps, positions.data_ptr(), table.data_ptr(),
            slots.data_ptr(), cache.data_ptr(), None if q is None else q.data_ptr(), entries.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return quantize_activation(q) if quant and q is not None else q, entries[:, :latent], entries[:, latent:]

    def sample(self, logits, inputs: SampleInputs):
        logits = logits.contiguous()
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        columns = (
            inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.sequence_idx, inputs.position.contiguous(),
        )  # fmt: skip
        pointers = [column.data_ptr() for column in columns]
        self.kernels.sample(logits.data_ptr(), *logits.shape, *pointers, tokens.data_ptr(), torch.get_num_threads())
        return tokens
