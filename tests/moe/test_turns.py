"""Micro-batches that take turns."""

from collections.abc import Iterator

from moe.turns import Turns, take_turns


def test_each_has_a_turn_until_it_ends():
    log: list[str] = []

    def work(name: str, num_turns: int) -> Turns[str]:
        for i in range(num_turns):
            log.append(f"{name}{i}")
            if i < num_turns - 1:
                yield
        return name.upper()

    works: list[Iterator] = [work("a", 3), work("b", 1), work("c", 2)]
    assert take_turns(works) == ["A", "B", "C"]
    assert log == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert take_turns([]) == []
