"""Expert dispatch of an instance with several ranks: who does it for which mode and shape, by `hw.cuda.rules`."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hw.api import Activation, Dispatched, ExpertComm, ExpertMode, ExpertStep
from hw.cuda.rules import DISPATCH, Dispatch
from hw.rules import choose


@dataclass(frozen=True)
class RanksHandle:
    """Who sent rows, and what they had to say."""

    comm: ExpertComm
    dispatched: Dispatched


class RanksExpertComm:
    """ExpertComm of several ranks. What they are reached by is opened at first need, on all of them."""

    def __init__(self, openers: dict[str, Callable[[], ExpertComm]], num_ranks: int, max_tokens_per_rank: int):
        """openers: of everyone whom the rules name."""
        self._openers, self._num_ranks, self.max_tokens_per_rank = openers, num_ranks, max_tokens_per_rank
        self._opened: dict[str, ExpertComm] = {}
        self._chosen: dict[Dispatch, str] = {}

    def by_name(self, name: str) -> ExpertComm:
        """One of those whom the rules name."""
        if name not in self._opened:
            self._opened[name] = self._openers[name]()
        return self._opened[name]

    def _choose(self, mode: ExpertMode, hidden_size: int, dtype: torch.dtype) -> ExpertComm:
        shape = Dispatch(mode, dtype, hidden_size, self.max_tokens_per_rank, self._num_ranks)
        if shape not in self._chosen:
            self._chosen[shape] = choose("dispatch", DISPATCH, shape).served_by
        return self.by_name(self._chosen[shape])

    def reserve(self, hidden_size: int, num_local_experts: int, dtype: torch.dtype) -> None:
        for mode in ExpertMode:
            self._choose(mode, hidden_size, dtype).reserve(hidden_size, num_local_experts, dtype)

    def dispatch(
        self, x: Activation, topk_phy: torch.Tensor, topk_weight: torch.Tensor, step: ExpertStep, num_local_experts: int
    ) -> Dispatched:
        dense = x.rows(quantized=False)
        comm = self._choose(step.mode, dense.shape[1], dense.dtype)
        dispatched = comm.dispatch(x, topk_phy, topk_weight, step, num_local_experts)
        return replace(dispatched, handle=RanksHandle(comm, dispatched))

    def combine(
        self, y: torch.Tensor, topk_weight: torch.Tensor, dispatched: Dispatched, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        handle: RanksHandle = dispatched.handle
        return handle.comm.combine(y, topk_weight, handle.dispatched, shared)
