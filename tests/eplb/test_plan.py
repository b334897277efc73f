"""Incremental plans: complete, as balanced as promised, and with moves that lead there."""

import numpy as np
import pytest

from eplb.pack import Layout, rebalance, replicate
from eplb.plan import (
    OTHER_NODE,
    SAME_NODE,
    SAME_RANK,
    Plan,
    _renumber,
    align_slots,
    balancedness,
    find_moves,
    move_batches,
    plan,
    rank_loads,
)
from eplb.search import Search

V3 = {
    "32 ranks, hierarchical": Layout(256, 32, 9, 4, 8),
    "144 ranks": Layout(256, 144, 2, 18, 8),
    "320 ranks": Layout(256, 320, 1, 40, 8),
    "one node": Layout(32, 4, 10, 1, 4),
}
layouts = pytest.mark.parametrize("layout", V3.values(), ids=V3.keys())


def skewed(layout: Layout, num_layers: int = 6) -> np.ndarray:
    return np.random.gamma(1.5, size=(num_layers, layout.num_logical))


def drifted(load: np.ndarray, amount: float) -> np.ndarray:
    return load * np.exp(amount * np.random.standard_normal(load.shape))


def in_order(layout: Layout, num_layers: int = 6) -> np.ndarray:
    return np.tile(np.arange(layout.num_physical) % layout.num_logical, (num_layers, 1))


def check(result: Plan, load: np.ndarray, current: np.ndarray, layout: Layout, tolerance: float) -> None:
    """All that must hold of any plan."""
    for row in result.phy2log:
        assert set(row.tolist()) == set(range(layout.num_logical))
    peaks = [rank_loads(load, placement, layout.num_ranks).max(-1) for placement in (current, result.phy2log, rebalance(load, layout))]
    assert np.array_equal(result.peak_before, peaks[0]) and np.array_equal(result.peak_after, peaks[1])
    assert (result.peak_after <= peaks[2] * (1 + tolerance) * (1 + 1e-12)).all()
    assert (result.peak_after <= result.peak_before * (1 + 1e-12)).all()
    # Reading all sources before any slot is written, the moves turn the old placement into the new one.
    moved, moves = current.copy(), result.moves
    moved[moves.layer, moves.target] = current[moves.layer, moves.source]
    assert np.array_equal(moved, result.phy2log)
    # What a rank held and still holds has not changed its slot.
    aligned = align_slots(result.phy2log, current, layout)
    assert np.array_equal(aligned == current, result.phy2log == current)


@layouts
def test_plans_reach_what_they_promise(layout: Layout):
    for start in (in_order(layout), rebalance(skewed(layout), layout)):
        for tolerance in (0.0, 0.005, 0.1):
            load = skewed(layout)
            check(plan(load, start, layout, tolerance=tolerance), load, start, layout, tolerance)


@layouts
def test_a_drift_moves_little(layout: Layout):
    load = skewed(layout)
    current, later = rebalance(load, layout), drifted(load, 0.02)
    result = plan(later, current, layout)
    check(result, later, current, layout, 0.002)
    anew = find_moves(current, align_slots(rebalance(later, layout), current, layout), layout)
    assert anew.num_remote > 0 and result.moves.num_remote <= 0.2 * anew.num_remote


@layouts
def test_what_is_balanced_stays(layout: Layout):
    load = skewed(layout)
    first = plan(load, in_order(layout), layout)
    again = plan(load, first.phy2log, layout)
    assert np.array_equal(again.phy2log, first.phy2log) and not len(again.moves.layer)
    assert np.array_equal(again.peak_after, first.peak_after)


def test_groups_stay_whole():
    layout = V3["32 ranks, hierarchical"]
    current = rebalance(skewed(layout), layout)
    for _ in range(3):
        current = plan(drifted(skewed(layout), 0.3), current, layout).phy2log
        for row in current:
            groups = [set((node // 32).tolist()) for node in row.reshape(4, -1)]
            assert all(len(held) == 2 for held in groups) and len(set.union(*groups)) == 8


def test_ranks_are_renumbered_when_all_is_packed_anew():
    """The same packing under other numbers of nodes and ranks, with loads that the search cannot mend: nothing moves."""
    layout = Layout(8, 4, 2, 2, 2)
    fresh = np.array([[0, 1, 2, 3, 4, 5, 6, 7]])
    other = fresh.reshape(2, 2, 2)[::-1, ::-1, ::-1].reshape(1, -1)
    assert np.array_equal(align_slots(_renumber(fresh, other, layout), other, layout), other)


def test_what_drifted_far_is_packed_anew():
    """Then all ranks are as even as DeepSeek's, not only below the limit; the other layers are searched."""
    layout = V3["144 ranks"]
    load = skewed(layout)
    current, later = rebalance(load, layout), drifted(load, 0.1)
    fresh = rebalance(later, layout)
    off = [rank_loads(later, slots, layout.num_ranks).max(-1) for slots in (current, fresh)]
    anew = float(np.median(off[0] / off[1])) - 1
    result = plan(later, current, layout, anew=anew)
    check(result, later, current, layout, 0.002)
    ours, theirs = (np.sort(rank_loads(later, slots, layout.num_ranks), -1) for slots in (result.phy2log, fresh))
    assert np.array_equal(np.isclose(ours, theirs).all(-1), off[0] > off[1] * (1 + anew))


def test_layers_can_be_left_out():
    layout = V3["144 ranks"]
    load, current = skewed(layout), in_order(layout)
    whole = plan(load, current, layout)
    mask = np.array([True, False, True, False, False, True])
    part = whole.only(mask, current)
    assert np.array_equal(part.phy2log[mask], whole.phy2log[mask]) and np.array_equal(part.phy2log[~mask], current[~mask])
    assert set(part.moves.layer.tolist()) == {0, 2, 5}
    assert np.array_equal(part.peak_after, rank_loads(load, part.phy2log, layout.num_ranks).max(-1))


def test_no_load_no_moves():
    layout = V3["one node"]
    result = plan(np.zeros((2, 32)), in_order(layout, 2), layout)
    assert not len(result.moves.layer) and result.balancedness_after.tolist() == [1.0, 1.0]


def test_sources_are_near_and_take_turns():
    """Ranks 0 1 | 2 3 of two slots on two nodes."""
    layout = Layout(6, 4, 2, 2)
    current = np.array([[0, 1, 2, 3, 4, 0, 5, 0]])
    wanted = np.array([[1, 0, 2, 0, 4, 5, 5, 4]])
    moves = find_moves(current, wanted, layout)
    assert moves.target.tolist() == [0, 1, 3, 5, 7]
    assert moves.source.tolist() == [1, 0, 0, 6, 4]
    assert moves.reach.tolist() == [SAME_RANK, SAME_RANK, SAME_NODE, SAME_NODE, SAME_NODE]
    assert moves.num_remote == 3 and moves.count(OTHER_NODE) == 0
    # One holder far away, then two holders at the same distance.
    assert find_moves(current, np.array([[2, 1, 2, 3, 4, 0, 5, 1]]), layout).reach.tolist() == [SAME_NODE, OTHER_NODE]
    # Two targets, two holders on the same node: one each.
    shared = find_moves(np.array([[0, 0, 1, 2, 3, 4, 1, 2]]), np.array([[0, 0, 0, 2, 3, 0, 1, 2]]), Layout(5, 8, 1))
    assert shared.target.tolist() == [2, 5] and shared.source.tolist() == [0, 1]


def test_batches_fill_one_layers_slots():
    layout = Layout(4, 2, 2)
    current = np.tile([0, 1, 2, 3], (5, 1))
    wanted = current.copy()
    wanted[0] = [0, 2, 1, 3]  # one to each rank
    wanted[1] = [0, 2, 1, 3]
    wanted[2] = [0, 2, 1, 3]
    wanted[3] = [2, 3, 0, 1]  # two to each
    wanted[4] = [0, 2, 1, 3]
    moves = find_moves(current, wanted, layout)
    assert move_batches(moves, layout) == [[0, 1], [2, 4], [3]]
    assert move_batches(find_moves(current, current, layout), layout) == []


def test_slots_are_aligned():
    layout = Layout(6, 2, 3)
    current = np.array([[0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4]])
    wanted = np.array([[2, 5, 0, 4, 3, 1], [1, 0, 0, 5, 4, 2]])
    assert align_slots(wanted, current, layout).tolist() == [[0, 5, 2, 3, 4, 1], [0, 0, 1, 2, 5, 4]]


def test_near_moves_win_where_they_are_enough():
    """Rank 0 is too hot; a swap with rank 1 on its node does, and so would one with rank 2 on the other, which is cooler still."""
    load = np.array([[6.0, 4.0, 4.0, 2.0, 3.0, 1.0, 5.0, 3.0]])
    current = np.arange(8)[None]
    searched = current.reshape(1, 4, 2).copy()
    Search(load, searched, np.array([8.5]), np.ones((1, 8), int), np.array([[0, 0, 1, 1]]), 4.0).run(max_changes=10)
    peaks = load[0][searched[0]].sum(-1)
    assert peaks.max() <= 8.5 and np.array_equal(searched[0, 2:], current.reshape(4, 2)[2:])


def test_two_slots_reach_the_best_pairing():
    """The claim in Search's docstring, for the copies that are wanted; the best pairs the heaviest with the lightest."""
    num_rows, num_ranks, num_experts = 40, 24, 36
    load = np.random.gamma(1.0, size=(num_rows, num_experts))
    slots = np.stack([np.random.permutation(2 * num_ranks) % num_experts for _ in range(num_rows)]).reshape(num_rows, num_ranks, 2)
    phy2log, wanted = replicate(load, 2 * num_ranks)
    shares = np.sort(np.take_along_axis(load / wanted, phy2log, -1), -1)
    best = (shares[:, :num_ranks] + shares[:, : num_ranks - 1 : -1]).max(-1)
    search = Search(load, slots, best * (1 + 1e-6), wanted, np.zeros((num_rows, num_ranks), int), 1.0)
    search.run(max_changes=1000)
    assert np.allclose(rank_loads(load, slots.reshape(num_rows, -1), num_ranks).max(-1), best, rtol=2e-6)


def test_balancedness():
    assert balancedness(np.array([[1.0, 3.0], [2.0, 2.0], [0.0, 0.0]])).tolist() == [2 / 3, 1.0, 1.0]
    assert rank_loads(np.array([[4.0, 2.0]]), np.array([[0, 1, 0, 1]]), 2).tolist() == [[3.0, 3.0]]
    assert rank_loads(np.array([[3.0, 2.0]]), np.array([[0, 0, 0, 1]]), 2).tolist() == [[2.0, 3.0]]
