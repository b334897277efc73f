"""The gated MLP of dense layers and of shared experts: `down(silu(gate x) * up x)`."""

import torch

from hw.api import Ops, Rows
from hw.weights import Storage, Weight, rows


class MLP:
    """Whole on every rank: between attentions the tokens are sliced over TP ranks, not the weights."""

    def __init__(self, hidden_size: int, intermediate_size: int, ops: Ops, *, prefix: str, storage: Storage):
        self.ops, self.prefix, self.intermediate_size = ops, prefix, intermediate_size
        self.gate_up = storage.matrix(2 * intermediate_size, hidden_size, edges=(intermediate_size,))  # gate rows first
        self.down = storage.matrix(hidden_size, intermediate_size)
        self._first = torch.zeros(1, 1, dtype=torch.int64, device=storage.device)
        self.takes_quant = ops.quantizes(self.gate_up, storage.dtype)
        self.inner_quant = ops.quantizes(self.down, storage.dtype)

    def weights(self) -> list[Weight]:
        inner, hidden = self.intermediate_size, self.down.shape[0]
        return [
            Weight(name=f"{self.prefix}.gate_proj.weight", shape=(inner, hidden), target=rows(self.gate_up, 0, inner)),
            Weight(name=f"{self.prefix}.up_proj.weight", shape=(inner, hidden), target=rows(self.gate_up, inner, 2 * inner)),
            Weight(name=f"{self.prefix}.down_proj.weight", shape=(hidden, inner), target=self.down),
        ]

    def forward(self, x: Rows) -> torch.Tensor:
        """x `[T, hidden]`, quantised if `takes_quant` -> `[T, hidden]`."""
        num_tokens, gate_up = x.shape[0], self.gate_up
        if isinstance(gate_up, torch.Tensor) and self.ops.fuses_experts(num_tokens, 1, gate_up[None], gate_up.dtype):
            inner = self.ops.fused_gate_up(x, self._first.expand(num_tokens, 1), gate_up[None])[:, 0]  # like the only one of experts
        else:
            inner = self.ops.silu_mul(self.ops.linear(x, gate_up), self.inner_quant)
        return self.ops.linear(inner, self.down)
