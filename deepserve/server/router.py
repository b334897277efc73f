"""Which engine rank runs a request: the one with the fewest sequences waiting or running; equals take turns."""

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Candidate(Protocol):
    num_sequences: int  # waiting and running


C = TypeVar("C", bound=Candidate)


class Router:
    def __init__(self):
        self._turn = 0

    def pick(self, candidates: Iterable[C]) -> C | None:
        """None when there is nobody to pick."""
        ranks = list(candidates)
        if not ranks:
            return None
        least = min(rank.num_sequences for rank in ranks)
        # The turn counts picks, not positions, so a rank that joins or leaves does not favour anyone.
        equals = [rank for rank in ranks if rank.num_sequences == least]
        self._turn += 1
        return equals[self._turn % len(equals)]
