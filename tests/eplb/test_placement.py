"""Placements: derived maps agree with phy2log for any sizes, and a wrong one cannot be made."""

import random

import pytest

from eplb.config import EPLBConfig
from eplb.placement import Placement, initial_placement


def check(placement: Placement) -> None:
    """All that must hold of any placement."""
    assert placement.slots_per_rank * placement.num_ranks == placement.num_physical == len(placement.phy2log)
    assert len(placement.log2phy) == placement.num_logical
    assert sorted(phy for slots in placement.log2phy for phy in slots) == list(range(placement.num_physical))
    for log, slots in enumerate(placement.log2phy):
        assert slots and list(slots) == sorted(slots)
        assert all(placement.phy2log[phy] == log for phy in slots)
    assert placement.max_replicas == max(map(len, placement.log2phy))
    held = [log for rank in range(placement.num_ranks) for log in placement.held_by(rank)]
    assert tuple(held) == placement.phy2log


def test_the_drawing_in_the_docstring():
    placement = initial_placement(8, 3)
    assert placement.phy2log == (0, 1, 2, 3, 4, 5, 6, 7, 0)
    assert placement.log2phy[0] == (0, 8)
    assert placement.held_by(2) == (6, 7, 0)
    assert placement.max_replicas == 2
    check(placement)


def test_initial_placement_for_any_sizes():
    for _ in range(500):
        num_logical, num_ranks, num_redundant = random.randint(1, 300), random.randint(1, 80), random.randint(0, 100)
        placement = initial_placement(num_logical, num_ranks, num_redundant)
        check(placement)
        assert placement.slots_per_rank == -(-(num_logical + num_redundant) // num_ranks)
        # The first copies are in order and replicas go round: counts differ by at most one.
        assert placement.phy2log[:num_logical] == tuple(range(num_logical))
        counts = [len(slots) for slots in placement.log2phy]
        assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


@pytest.mark.parametrize(
    ("num_ranks", "num_redundant", "slots", "replicas"), [(1, 0, 256, 1), (32, 32, 9, 2), (72, 0, 4, 2), (256, 0, 1, 1)]
)
def test_v3(num_ranks: int, num_redundant: int, slots: int, replicas: int):
    placement = initial_placement(256, num_ranks, num_redundant)
    assert placement.slots_per_rank == slots
    assert placement.max_replicas == replicas


def test_any_complete_map_is_a_placement():
    for _ in range(100):
        num_logical, num_ranks = random.randint(1, 20), random.randint(1, 6)
        spare = random.randint(0, 10)
        num_physical = -(-(num_logical + spare) // num_ranks) * num_ranks
        slots = list(range(num_logical)) + [random.randrange(num_logical) for _ in range(num_physical - num_logical)]
        random.shuffle(slots)
        check(Placement(num_logical, num_ranks, tuple(slots)))


@pytest.mark.parametrize(
    ("num_logical", "num_ranks", "phy2log", "message"),
    [
        (3, 2, (0, 1, 2), "3 slots over 2 ranks"),
        (3, 1, (0, 1, 3), r"\(0, 1, 3\)"),
        (2, 1, (0, -1, 1), r"-1"),
        (4, 2, (0, 1, 1, 0), r"no slot holds the logical experts \[2, 3\]"),
        (1, 1, (), r"no slot holds the logical experts \[0\]"),
    ],
)
def test_wrong_maps(num_logical: int, num_ranks: int, phy2log: tuple[int, ...], message: str):
    with pytest.raises(AssertionError, match=message):
        Placement(num_logical, num_ranks, phy2log)


def test_placements_compare_by_value():
    assert initial_placement(4, 2) == Placement(4, 2, (0, 1, 2, 3))
    assert hash(initial_placement(4, 2)) == hash(Placement(4, 2, (0, 1, 2, 3)))


def test_config():
    assert EPLBConfig().num_redundant_experts == 0
    with pytest.raises(ValueError, match="num_redundant_experts must be at least 0, got -1"):
        EPLBConfig(num_redundant_experts=-1)
