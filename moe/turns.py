"""Micro-batches that take turns, so that the device computes for one while rows of the other travel between ranks.

    host queues   | A: attention, gate | B: attention, gate | A: dispatch, experts | B: dispatch, experts | A: combine, attention, ...
    device        | attention of A     | attention of B     | experts of A         | experts of B         | attention of A
    between ranks                        dispatch of A        dispatch of B          combine of A           combine of B

What travels is queued at the begin of a turn, behind what the micro-batch had queued by the end of its last one (`Runtime.fork`).
"""

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Turns = Generator[None, None, T]  # a yield ends a turn


def take_turns(works: Sequence[Turns[T]]) -> list[T]:
    """Run all to their end, a turn of each after the other; what each returned."""
    results: dict[int, T] = {}
    while len(results) < len(works):
        for i, work in enumerate(works):
            if i not in results:
                try:
                    next(work)
                except StopIteration as end:
                    results[i] = end.value
    return [results[i] for i in range(len(works))]
