"""Placements for ranks that came together anew."""

import random
from collections import Counter

import pytest

from eplb.cover import cover


def test_what_is_held_stays_and_what_is_missing_takes_the_place_of_a_copy():
    # Rank 1 of three died; experts 2 and 3 were its own.
    assert cover([[0, 1, 5], [4, 5, 0]], 6, 3) == [[2, 1, 5], [4, 3, 0]]
    assert cover([[0, 1], [2, 3]], 4, 2) == [[0, 1], [2, 3]]


def test_more_slots_take_what_is_missing_evenly_and_repeat_what_is_there():
    assert cover([[0, 1], [2, 3]], 8, 4) == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert cover([[0, 1], [2, 3]], 5, 3) == [[0, 1, 4], [2, 3, 2]]


def test_fewer_slots_give_up_copies_first():
    assert cover([[0, 1, 2, 3], [0, 1]], 4, 2) == [[2, 3], [0, 1]]


def test_too_few_slots():
    with pytest.raises(ValueError, match="2 ranks with 3 slots each cannot hold 8 experts"):
        cover([[0, 1, 2], [3, 4, 5]], 8, 3)


def test_random_changes():
    """Whoever dies or joins: all is covered, and no more is read than nobody held."""
    rng = random.Random(5)
    for _ in range(300):
        num_logical, slots_before = rng.randint(1, 12), rng.randint(1, 8)
        held = [[rng.randrange(num_logical) for _ in range(slots_before)] for _ in range(rng.randint(1, 5))]
        slots = max(-(-num_logical // len(held)), rng.randint(1, 8))
        found = cover(held, num_logical, slots)
        assert [len(row) for row in found] == [slots] * len(held)
        assert {expert for row in found for expert in row} == set(range(num_logical))
        read = [expert for before, row in zip(held, found, strict=True) for expert in set(row) - set(before)]
        assert max(Counter(read).values(), default=0) <= 1
        if slots >= slots_before:
            assert not {expert for row in held for expert in row} & set(read)
        if slots == slots_before:
            kept = sum(a == b for before, row in zip(held, found, strict=True) for a, b in zip(before, row, strict=True))
            assert kept == len(held) * slots - len(read)  # nothing else was touched
