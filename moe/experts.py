"""Routed experts of one rank: grouped GEMM, SwiGLU, grouped GEMM, in the layout that dispatch produced."""

from collections.abc import Callable, Iterable

import torch

from hw.api import Activation, Dispatched, Ops
from hw.quant import QuantTensor
from hw.weights import Storage, Weight, expert, rows
from moe.config import MoEConfig


class Experts:
    """Physical experts held here. `held` are the logical ids of this rank's slots, in slot order; replicas repeat an id."""

    def __init__(self, config: MoEConfig, ops: Ops, held: tuple[int, ...], *, prefix: str, storage: Storage):
        self.config, self.ops, self.held, self.prefix, self._storage = config, ops, held, prefix, storage
        self._allocate(len(held))
        self.takes_quant = ops.quantizes(self.gate_up, storage.dtype)
        self.inner_quant = ops.quantizes(self.down, storage.dtype)

    def _allocate(self, num_slots: int) -> None:
        inner, hidden = self.config.intermediate_size, self.config.hidden_size
        self.gate_up = self._storage.matrix(num_slots, 2 * inner, hidden, edges=(inner,))  # gate rows first
        self.down = self._storage.matrix(num_slots, hidden, inner)

    def hold(self, wanted: tuple[int, ...]) -> list[Weight]:
        """Hold these from now on, in as many slots as they are. What is here already is kept; the rest is returned, to be filled.

        Storage is new if the number of slots is.
        """
        before, had = self.tensors(), self.held
        resized = len(wanted) != len(had)
        if resized:
            self._allocate(len(wanted))
        # Without new storage a slot can be copied from only if it is not itself to change.
        source = {logical: slot for slot, logical in enumerate(had) if resized or wanted[slot] == logical}
        unread = []
        for slot, logical in enumerate(wanted):
            if logical not in source:
                unread.append(slot)
            elif resized or had[slot] != logical:
                for old, new in zip(before, self.tensors(), strict=True):
                    new[slot].copy_(old[source[logical]])
        self.held = wanted
        return self.weights(unread)

    def weights(self, slots: Iterable[int] | None = None) -> list[Weight]:
        """Of some slots, or of all."""
        inner, hidden = self.config.intermediate_size, self.config.hidden_size
        found = []
        for local in range(len(self.held)) if slots is None else slots:
            name, gate_up = f"{self.prefix}.{self.held[local]}", expert(self.gate_up, local)
            found += [
                Weight(name=f"{name}.gate_proj.weight", shape=(inner, hidden), target=rows(gate_up, 0, inner)),
                Weight(name=f"{name}.up_proj.weight", shape=(inner, hidden), target=rows(gate_up, inner, 2 * inner)),
                Weight(name=f"{name}.down_proj.weight", shape=(hidden, inner), target=expert(self.down, local)),
            ]
        return found

    def tensors(self) -> list[torch.Tensor]:
        """What the slots hold, `[slots, ...]` each: weights, and their scales if they are quantised."""
        pairs = [(m.data, m.scale) if isinstance(m, QuantTensor) else (m,) for m in (self.gate_up, self.down)]
        return [tensor for pair in pairs for tensor in pair]

    def fuses(self, num_tokens: int) -> bool:
        """Whether so few tokens do without dispatch and combine where all experts are here."""
        return self.ops.fuses_experts(num_tokens, self.config.top_k, self.gate_up, self._storage.dtype)

    def fused(
        self, x: Activation, topk_phy: torch.Tensor, topk_weight: torch.Tensor, shared: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor:
        """The layer's output `[T, hidden]`; `shared` gives the shared experts' rows."""
        inner = self.ops.fused_gate_up(x.rows(quantized=False), topk_phy, self.gate_up)
        return self.ops.fused_down(inner, topk_phy, topk_weight, self.down, shared())

    def forward(self, dispatched: Dispatched) -> torch.Tensor:
        """Expert outputs in the layout of `dispatched.x`."""
        ops, counts, layout, expected = self.ops, dispatched.counts, dispatched.layout, dispatched.expected
        if layout is not None:
            inner = ops.silu_mul(ops.grouped_linear(dispatched.x, self.gate_up, layout), self.inner_quant)
            return ops.grouped_linear(inner, self.down, layout)
        inner = ops.silu_mul(ops.grouped_linear_masked(dispatched.x, self.gate_up, counts, expected), self.inner_quant, counts)
        return ops.grouped_linear_masked(inner, self.down, counts, expected)
