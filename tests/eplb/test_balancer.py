"""Looks, plans and moves of all ranks together, over gloo, with layers that are only counters and weights."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from eplb.balancer import Balancer
from eplb.config import EPLBConfig
from eplb.decide import Costs
from eplb.load import PHASES, LoadProfile
from eplb.pack import Layout
from eplb.placement import Placement, initial_placement
from eplb.plan import balancedness, rank_loads
from hw.cpu.runtime import CpuRuntime
from hw.groups import Group, Rendezvous
from tests.hw.ranks import Ranks

NUMBERS = (3, 4, 7)
NUM_LOGICAL, SLOTS = 12, 8
CHEAP = Costs(token_s=1.0, expert_bytes=24, node_bytes_per_s=1e6, network_bytes_per_s=1e6)


def expert(number: int, logical: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * number + logical))


class Layer:
    """A layer that checks, whenever it is placed, that its weights are already there."""

    def __init__(self, number: int, placement: Placement, rank: int):
        self.number, self.rank, self.placement = number, rank, placement
        self.load = torch.zeros(len(PHASES), NUM_LOGICAL, dtype=torch.int64)
        self.weights = torch.stack([expert(number, logical) for logical in placement.held_by(rank)])

    def expert_tensors(self) -> list[torch.Tensor]:
        return [self.weights]

    def place(self, placement: Placement) -> None:
        self.placement = placement
        self.check()

    def check(self) -> None:
        assert torch.equal(self.weights, torch.stack([expert(self.number, logical) for logical in self.placement.held_by(self.rank)]))


def step_counts(rank: int, step: int, phase: int) -> torch.Tensor:
    """Tokens of one rank by layer and expert, known to every process; what is hot changes every 200 steps."""
    rng = np.random.default_rng([rank, step, phase])
    mean = np.random.default_rng([step // 200, phase]).gamma(0.5, 20, (len(NUMBERS), NUM_LOGICAL))
    return torch.from_numpy(rng.poisson(mean))


@cache
def world(rendezvous: Rendezvous, rank: int, size: int) -> Group:
    return Group("world", list(range(size)), rank, rendezvous)


def serve(rendezvous, rank: int, size: int, config: EPLBConfig, costs: Costs, num_steps: int) -> list[list[tuple[int, ...]]]:
    """The placements that hold in each step."""
    group, layout = world(rendezvous, rank, size), Layout(NUM_LOGICAL, size, SLOTS)
    placement = initial_placement(NUM_LOGICAL, size, size * SLOTS - NUM_LOGICAL)
    layers = {number: Layer(number, placement, rank) for number in NUMBERS}
    for layer in layers.values():
        layer.load += 1000  # from before
    balancer = Balancer(
        layers, config, layout, costs, control=group, data=group, buffer=torch.empty(SLOTS * 24, dtype=torch.uint8), runtime=CpuRuntime()
    )
    held = []
    for step in range(num_steps):
        balancer.turn()
        for layer in layers.values():
            layer.check()
        held.append([layer.placement.phy2log for layer in layers.values()])
        for phase in range(len(PHASES)):
            for layer, counts in zip(layers.values(), step_counts(rank, step, phase), strict=True):
                layer.load[phase] += counts
    return held


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, ranks_of: Callable[[int], Ranks]) -> Ranks:
    return ranks_of(request.param)


def mean_balance(size: int, held: list[list[tuple[int, ...]]], steps: range) -> float:
    """Under the loads of those steps."""
    load = sum(step_counts(rank, step, phase) for rank in range(size) for step in steps for phase in range(2)).numpy()
    return float(np.mean([balancedness(rank_loads(load, np.array(held[step]), size)) for step in steps]))


def test_all_ranks_agree_and_balance_follows_the_load(ranks: Ranks):
    config = EPLBConfig(step_interval=20, window_size=32, hysteresis=1.0, step_budget_ms=0.02)  # 20 bytes: two slices an expert
    held, *others = ranks.run(serve, ranks.size, config, CHEAP, 400)
    assert all(other == held for other in others)
    assert len({tuple(placements) for placements in held}) > 4
    for steps in (range(120, 200), range(320, 400)):
        before = mean_balance(ranks.size, [held[0]] * 400, steps)
        after = mean_balance(ranks.size, held, steps)
        assert after > 0.97 and after > before + 0.02, (steps, before, after)


def test_moves_must_pay(ranks: Ranks):
    config = EPLBConfig(step_interval=20, window_size=32)
    dear = Costs(token_s=1e-9, expert_bytes=24, node_bytes_per_s=1.0, network_bytes_per_s=1.0)
    held, *_ = ranks.run(serve, ranks.size, config, dear, 100)
    assert len({tuple(placements) for placements in held}) == 1


@pytest.mark.parametrize(("window_size", "seen"), [(16, range(63, 79)), (160, range(70))])
def test_the_window_is_what_all_ranks_counted(ranks: Ranks, tmp_path: Path, window_size: int, seen: range):
    """After 80 steps, read one sixteenth of a window late, as nobody waits for the device."""
    config = EPLBConfig(step_interval=80, window_size=window_size, dump_profile=str(tmp_path / "load.json"))
    ranks.run(serve, ranks.size, config, CHEAP, 98)
    assert [file.name for file in tmp_path.iterdir()] == ["load.json"]
    profile = LoadProfile.read(tmp_path / "load.json", NUMBERS, NUM_LOGICAL)
    assert profile.layers == NUMBERS and profile.num_steps == len(seen)
    for phase in range(len(PHASES)):
        expected = sum(step_counts(rank, step, phase) for rank in range(ranks.size) for step in seen).numpy()
        assert np.array_equal(profile.tokens[phase], expected)


def test_a_profile_that_cannot_be_written_stops_nothing(ranks: Ranks, tmp_path: Path):
    config = EPLBConfig(step_interval=20, window_size=16, dump_profile=str(tmp_path / "absent" / "load.json"))
    held, *others = ranks.run(serve, ranks.size, config, CHEAP, 100)
    assert all(other == held for other in others) and len({tuple(placements) for placements in held}) > 1
