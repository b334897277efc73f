"""A mixture-of-experts layer, cut into stages so that two micro-batches can overlap (`moe.turns`).

x -> route -> dispatch -> experts -> combine -> + shared(x)
     gate,    tokens go   grouped    rows come home and
     router   to experts  GEMMs      are summed in top-k order
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eplb.placement import Placement
from hw.api import Activation, Backend, Dispatched, ExpertMode, ExpertStep, T
from hw.weights import Storage, Weight
from moe.config import MoEConfig
from moe.experts import Experts
from moe.gate import Gate
from moe.mlp import MLP
from moe.router import replicas_of, update_replicas
from moe.turns import Turns, take_turns


@dataclass(frozen=True)
class Routed:
    """Where tokens go. The logical ids stay for load counting and routing replay."""

    topk_idx: torch.Tensor  # [T, k] int64, logical
    topk_phy: torch.Tensor  # [T, k] int64, physical
    topk_weight: torch.Tensor  # [T, k] fp32


class MoELayer:
    """Routed and shared experts of one layer on one rank of the expert-parallel group."""

    def __init__(
        self,
        config: MoEConfig,
        backend: Backend,
        placement: Placement,
        rank: int,
        *,
        prefix: str,
        storage: Storage,
    ):
        self.config, self.comm, self.placement, self.dtype = config, backend.expert_comm, placement, storage.dtype
        self.runtime = backend.runtime
        self.gate = Gate(config, backend.ops, prefix=f"{prefix}.gate", device=storage.device)
        self.replicas = replicas_of(placement, storage.device, rank=rank)
        self.local = Experts(config, backend.ops, placement.held_by(rank), prefix=f"{prefix}.experts", storage=storage)
        self.shared: MLP | None = None
        if config.num_shared_experts:
            width = config.num_shared_experts * config.intermediate_size
            self.shared = MLP(config.hidden_size, width, backend.ops, prefix=f"{prefix}.shared_experts", storage=storage)
        self.load: torch.Tensor | None = None  # see `prepare_moves`
        self.rank = rank
        self.takes_quant = self.local.takes_quant or (self.shared is not None and self.shared.takes_quant)

    def weights(self) -> list[Weight]:
        return [*self.gate.weights(), *self.local.weights(), *(self.shared.weights() if self.shared else [])]

    def reserve(self) -> None:
        """Take the buffers that dispatch keeps; see `hw.api.ExpertComm`."""
        self.comm.reserve(self.config.hidden_size, self.placement.slots_per_rank, self.dtype)

    def prepare_moves(self) -> None:
        """From here on experts may move between ranks, and `load` `[2, num_logical]` int64 counts this rank's tokens by the experts they
        choose: first those of throughput steps (prefill), then those of low-latency steps (decode). Before steps are captured.
        """
        self._make_room_for_replicas()
        self.load = torch.zeros((2, self.placement.num_logical), dtype=torch.int64, device=self.gate.weight.device)
        self._one = torch.ones(1, dtype=torch.int64, device=self.gate.weight.device)

    def _make_room_for_replicas(self) -> None:
        """Of any placement with as many slots as there are."""
        spare = self.placement.num_physical - self.placement.num_logical
        self.replicas = replicas_of(self.placement, self.gate.weight.device, rank=self.rank, width=spare + 1)

    def hold(self, placement: Placement, rank: int) -> list[Weight]:
        """Become `rank` of other ranks than before, with this placement; not for captured steps. Returns what has yet to be filled."""
        self.placement, self.rank = placement, rank
        self._make_room_for_replicas()
        return self.local.hold(placement.held_by(rank))

    def expert_tensors(self) -> list[torch.Tensor]:
        """Weights of this rank's slots, `[slots_per_rank, ...]` each."""
        return self.local.tensors()

    def place(self, placement: Placement) -> None:
        """Route by this placement, whose weights are in their slots. In place, so captured steps do too."""
        self.placement, self.local.held = placement, placement.held_by(self.rank)
        update_replicas(self.replicas, placement, rank=self.rank)

    def route(self, x: torch.Tensor) -> Routed:
        return Routed(*self.gate.forward(x, self.replicas))

    def dispatch(self, x: Activation, routed: Routed, step: ExpertStep) -> Dispatched:
        x = x if self.local.takes_quant else Activation(x.dense)
        return self.comm.dispatch(x, routed.topk_phy, routed.topk_weight, step, self.placement.slots_per_rank)

    def experts(self, dispatched: Dispatched) -> torch.Tensor:
        return self.local.forward(dispatched)

    def combine(self, y: torch.Tensor, routed: Routed, dispatched: Dispatched, shared: torch.Tensor | None) -> torch.Tensor:
        """Routed sum in fp32 plus the shared experts, which routed scaling does not touch; `[T, hidden]` in y's dtype."""
        return self.comm.combine(y, routed.topk_weight, dispatched, shared)

    def turns(self, x: Activation, step: ExpertStep) -> Turns[torch.Tensor]:
        """`forward`. In an overlapped step a turn ends where rows are about to travel, and the next one sends them."""
        routed = self.route(x.rows(quantized=False))
        # After the gate, whose small kernels would wait for multiprocessors behind the shared experts' large ones.
        shared = self.runtime.beside(lambda: None if self.shared is None else self.shared.forward(x.rows(self.shared.takes_quant)))
        if self.load is not None:
            chosen = routed.topk_idx.flatten()
            self.load[int(step.mode is ExpertMode.LOW_LATENCY)].index_add_(0, chosen, self._one.expand(chosen.numel()))
        if self.placement.num_ranks == 1 and self.local.fuses(routed.topk_phy.shape[0]):
            return self.local.fused(x, routed.topk_phy, routed.topk_weight, shared)
        dispatched = yield from self._travel(step, lambda: self.dispatch(x, routed, step))
        y, shared_rows = self.experts(dispatched), shared()
        return (yield from self._travel(step, lambda: self.combine(y, routed, dispatched, shared_rows)))

    def _travel(self, step: ExpertStep, work: Callable[[], T]) -> Turns[T]:
        """Rows are on their way while the device does what the other micro-batch has queued in its turn."""
        if not step.overlapped:
            return work()
        behind = self.runtime.fork()
        yield
        return behind(work)

    def forward(self, x: Activation, step: ExpertStep) -> torch.Tensor:
        """x `[T, hidden]` normed, dense for the gate, and quantised too if `takes_quant` -> `[T, hidden]`."""
        (y,) = take_turns([self.turns(x, step)])
        return y
