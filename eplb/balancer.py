"""Keeps an instance's experts balanced while it serves: counts, looks, plans, moves. One on each rank, all in step.

Every rank calls `turn()` before each step. Counters on the device are read every sixteenth of a window. Every `step_interval` steps rank 0
adds up what all ranks counted and plans beside the steps; a fixed number of steps later it tells the others the placement, and the moves
begin, a slice before each step. The planner works with floating-point numbers, so one rank plans for all: two might not agree.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch

from eplb.config import EPLBConfig
from eplb.decide import Costs
from eplb.load import LoadProfile, LoadWindow
from eplb.migrate import Migration
from eplb.pack import Layout
from eplb.placement import Placement
from eplb.plan import SAME_RANK, find_moves
from eplb.planner import Planner, Question
from hw.api import Runtime
from hw.groups import Group
from hw.moves import Exchange

_READS = 16  # of the counters, in a window
_PLAN_STEPS = 16  # that a plan has time for, or fewer if looks are closer together


class Balanced(Protocol):
    """What is balanced: the experts of one layer."""

    placement: Placement
    load: torch.Tensor  # [phases, num_logical] int64 on the device: tokens of this rank that chose each expert, since the start

    def expert_tensors(self) -> list[torch.Tensor]:
        """This rank's weights, `[slots_per_rank, ...]` each."""

    def place(self, placement: Placement) -> None:
        """Route by this placement from the next step on."""


class Balancer:
    """One rank's part."""

    def __init__(
        self, layers: Mapping[int, Balanced], config: EPLBConfig, layout: Layout, costs: Costs, *, control: Group, data: Exchange,
        buffer: torch.Tensor, runtime: Runtime,
    ):  # fmt: skip
        """layers: by their numbers in the model. control, data: all ranks of the layout, for messages and weights. buffer: see Migration.

        Counters count from here on.
        """
        self._numbers, self._layers = tuple(layers), list(layers.values())
        self._config, self._layout, self._costs, self._interval = config, layout, costs, config.step_interval
        self._control, self._data, self._buffer, self._runtime = control, data, buffer, runtime
        self._current = np.array([layer.placement.phy2log for layer in self._layers])
        self._window = LoadWindow(len(layers), layout.num_logical, config.window_size)
        self._read_steps = -(-config.window_size // _READS)
        self._num_steps = 0  # that have run
        self._adopt_step: int | None = None  # when the plan that is being made is due
        self._planner = Planner() if control.rank == 0 else None
        self._profile: LoadProfile | None = None  # of the look whose plan is being made
        self._planned: Future[np.ndarray] | None = None
        self._regrouped = False  # since the last look
        self.report: tuple[LoadProfile, np.ndarray] | None = None  # on rank 0: loads of the last look, and phy2log from then on
        self._migration: Migration | None = None
        self._wanted = self._current
        self._num_coming = np.zeros(len(layers), np.int64)  # experts of each layer that the migration brings to this rank
        self._fetch = self._download()
        self._seen = self._fetch()[0]
        self._fetch_steps = 0
        self.num_moved_experts = 0  # that came to this rank from others, since the start

    def regroup(self, layout: Layout, buffer: torch.Tensor) -> None:
        """Go on with other ranks, whose placements the layers have already. What was planned or was moving is dropped, what was counted
        stays, and the next turn looks.
        """
        self._layout, self._buffer = layout, buffer
        self._current = self._wanted = np.array([layer.placement.phy2log for layer in self._layers])
        self._migration = self._adopt_step = self._profile = self._planned = self.report = None
        self._num_steps, self._regrouped = 0, True
        self._fetch_steps = 0  # what was asked for may have been before a step that is done again; ranks ask alike from here on
        if self._control.rank == 0 and self._planner is None:
            self._planner = Planner()

    def turn(self) -> None:
        """Between two steps. Collective; raises PeerLost."""
        if self._num_steps and self._num_steps % self._read_steps == 0:
            self._count()
        if self._migration is not None:
            self._move()
        elif self._adopt_step is not None:
            if self._num_steps == self._adopt_step:
                self._adopt()
        elif self._regrouped or (self._num_steps and self._interval and self._num_steps % self._interval == 0):
            self._look()
        self._num_steps += 1

    def _download(self) -> Callable[[], list[torch.Tensor]]:
        return self._runtime.download([torch.stack([layer.load for layer in self._layers], 1)])

    def _count(self) -> None:
        """Take what was asked for the last time, and ask again: nobody waits for the device."""
        counts = self._fetch()[0].clone()
        if self._fetch_steps:
            self._window.add((counts - self._seen).numpy(), self._fetch_steps)
        self._seen = counts
        self._fetch, self._fetch_steps = self._download(), self._read_steps

    def _look(self) -> None:
        """All ranks' counts go to rank 0, which begins to plan."""
        self._adopt_step = self._num_steps + min(_PLAN_STEPS, self._interval or _PLAN_STEPS)
        mine = torch.from_numpy(self._window.total.copy())[None]
        nobody = [0] * (self._control.size - 1)
        leads = self._control.rank == 0
        counts = self._control.all_to_all(mine, [1, *nobody], [1] * self._control.size if leads else [0, *nobody])
        if leads:
            assert self._planner is not None
            self._profile = LoadProfile(self._numbers, self._window.num_steps, counts.sum(0).numpy())
            question = Question(self._profile, self._current.copy(), self._layout, self._costs, self._config, self._regrouped)
            self._planned = self._planner.ask(question)
        self._regrouped = False

    def _adopt(self) -> None:
        """All ranks learn the plan."""
        self._adopt_step = None
        data = None if self._planned is None else self._planned.result().astype(np.int32).tobytes()
        self._wanted = np.frombuffer(self._control.broadcast_bytes(data), np.int32).reshape(self._current.shape).astype(np.int64)
        self.report = None if self._profile is None else (self._profile, self._wanted)
        moves = find_moves(self._current, self._wanted, self._layout)
        if not len(moves.layer):
            return
        slowest = self._costs.node_bytes_per_s if self._layout.num_nodes == 1 else self._costs.network_bytes_per_s
        weights = {int(row): self._layers[row].expert_tensors() for row in np.unique(moves.layer)}
        slice_bytes = max(1, int(self._config.step_budget_ms * 1e-3 * slowest))
        self._migration = Migration(weights, moves, self._layout, self._data, buffer=self._buffer, slice_bytes=slice_bytes)
        coming = (moves.target // self._layout.slots_per_rank == self._control.rank) & (moves.reach != SAME_RANK)
        self._num_coming = np.bincount(moves.layer[coming], minlength=len(self._layers))

    def _move(self) -> None:
        assert self._migration is not None
        layout = self._layout
        for row in self._migration.advance():
            self._current[row] = self._wanted[row]
            self.num_moved_experts += int(self._num_coming[row])
            self._layers[row].place(Placement(layout.num_logical, layout.num_ranks, tuple(self._current[row].tolist()), layout.num_nodes))
        if self._migration.done:
            self._migration = None
