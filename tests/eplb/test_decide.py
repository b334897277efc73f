"""Layers move when they pay for it."""

import numpy as np
import pytest

from eplb.decide import Costs, decide, migration_s
from eplb.pack import Layout
from eplb.plan import Moves, Plan

LAYOUT = Layout(6, 4, 2, 2)  # ranks 0 1 | 2 3
COSTS = Costs(token_s=1e-6, expert_bytes=100, node_bytes_per_s=1000.0, network_bytes_per_s=100.0)


def made(peak_before: list[float], peak_after: list[float], moves: list[tuple[int, int, int]]) -> Plan:
    """moves: (layer, target slot, reach)."""
    layer, target, reach = np.array(moves).T
    peaks = (np.array(peak_before), np.array(peak_after))
    return Plan(np.zeros((len(peak_before), 8), int), *peaks, peaks[0] / 2, Moves(layer, target, target, reach))


def test_gain_and_cost_in_seconds():
    # Layer 0: two experts from the node to rank 0, one to rank 1, one within a rank. Layer 1: one from outside, one from the node.
    plan = made([9000.0, 5000.0], [4000.0, 5000.0], [(0, 0, 1), (0, 1, 1), (0, 2, 1), (0, 3, 0), (1, 6, 2), (1, 7, 1)])
    decision = decide(plan, LAYOUT, COSTS, window_steps=10, horizon_steps=1000, hysteresis=2.0)
    assert decision.gain_s.tolist() == pytest.approx([5000 / 10 * 1e-6 * 1000, 0.0])
    assert decision.cost_s.tolist() == pytest.approx([2 * 0.1, 1.0])
    assert decision.layers.tolist() == [True, False]


def test_layers_that_move_together_cost_less():
    # Two layers of one expert from the node, to the same rank: they fill the buffer, and the third layer comes after them.
    plan = made([1.0] * 4, [1.0] * 4, [(0, 0, 1), (2, 1, 1), (3, 0, 2), (3, 2, 1)])
    assert migration_s(plan.moves, LAYOUT, COSTS) == pytest.approx(2 * 0.1 + 1.0)
    # To different ranks: all at once.
    plan = made([1.0] * 4, [1.0] * 4, [(0, 0, 1), (1, 2, 1), (3, 4, 1)])
    assert migration_s(plan.moves, LAYOUT, COSTS) == pytest.approx(0.1)


def test_hysteresis_and_horizon():
    plan = made([9000.0], [4000.0], [(0, 0, 1)])  # 0.5 ms a step against 0.1 s

    def moves(horizon_steps: int, hysteresis: float) -> bool:
        return bool(decide(plan, LAYOUT, COSTS, window_steps=10, horizon_steps=horizon_steps, hysteresis=hysteresis).layers[0])

    assert moves(1000, 2.0) and moves(1000, 4.9) and not moves(1000, 5.1)
    assert not moves(300, 2.0) and moves(500, 2.0)


def test_a_plan_without_moves_is_no_move():
    plan = made([5.0], [5.0], [(0, 0, 1)]).only(np.array([False]), np.zeros((1, 8), int))
    decision = decide(plan, LAYOUT, COSTS, window_steps=1, horizon_steps=1, hysteresis=0.0)
    assert (decision.gain_s, decision.cost_s, decision.layers) == ([0.0], [0.0], [False])
