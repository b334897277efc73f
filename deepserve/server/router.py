"""Which engine rank runs a request: the one where it costs least, as long as the ranks stay level.

Cost in tokens: what is queued there, what decoding there weighs, and the part of this prompt that the rank has not computed before. A rank
with clearly more sequences than the least busy one is left out whatever it has cached: in lockstep the busiest rank sets the pace.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

# Prefixes are remembered in runs of this many tokens: coarser than pages, since a guess is enough and 128 hashes cover 32k tokens.
RUN_TOKENS = 256
# One more sequence slows every step of a rank about as much as this many prompt tokens slow one.
SEQUENCE_TOKENS = 32
# Ranks may differ by this many sequences, or by this share of the least busy one's, for the sake of cached prefixes.
SLACK_SEQUENCES = 4
SLACK_SHARE = 0.25
# No free page left: whoever goes there waits, or makes another sequence give way.
FULL_TOKENS = 1 << 20


class Candidate(Protocol):
    """A rank as the frontend knows it."""

    num_sequences: int  # waiting and running
    num_queued_tokens: int  # of prompts sent there that have not been computed
    num_free_tokens: int  # room in pages that are free or cached
    num_cache_tokens: int  # room in all its pages


C = TypeVar("C", bound=Candidate)


class Router:
    """Remembers which prefixes it sent where; the ranks' own caches may have dropped them since, which costs time and nothing else."""

    def __init__(self):
        self._turn = 0
        self._prefixes: WeakKeyDictionary[Candidate, OrderedDict[int, None]] = WeakKeyDictionary()

    def pick(self, candidates: Iterable[C], prompt: list[int], cache_salt: str = "") -> C | None:
        """None when there is nobody to pick."""
        ranks = list(candidates)
        if len(ranks) <= 1:
            return ranks[0] if ranks else None
        least = min(rank.num_sequences for rank in ranks)
        level = [rank for rank in ranks if rank.num_sequences <= least + max(SLACK_SEQUENCES, SLACK_SHARE * least)]
        runs = list(_runs(prompt, cache_salt))
        costs = [self._cost(rank, len(prompt), runs) for rank in level]
        best = min(costs)
        # The turn counts picks, not positions, so a rank that joins or leaves does not favour anyone.
        equals = [rank for rank, cost in zip(level, costs, strict=True) if cost == best]
        self._turn += 1
        chosen = equals[self._turn % len(equals)]
        self._remember(chosen, runs)
        return chosen

    def _cost(self, rank: Candidate, num_prompt: int, runs: list[int]) -> int:
        known = self._prefixes.get(rank, ())
        num_cached = 0
        for run in runs:
            if run not in known:
                break
            num_cached += RUN_TOKENS
        fresh = num_prompt - num_cached
        cost = rank.num_queued_tokens + SEQUENCE_TOKENS * rank.num_sequences + fresh
        return cost + (FULL_TOKENS if rank.num_free_tokens < fresh else 0)

    def _remember(self, rank: Candidate, runs: list[int]) -> None:
        known = self._prefixes.setdefault(rank, OrderedDict())
        for run in reversed(runs):  # the head of a prefix is the last to be forgotten
            known[run] = None
            known.move_to_end(run)
        while len(known) * RUN_TOKENS > rank.num_cache_tokens:
            known.popitem(last=False)


def _runs(prompt: list[int], cache_salt: str) -> Iterator[int]:
    """A hash for every whole run of the prompt that also stands for all before it."""
    parent = hash(cache_salt)
    for low in range(0, len(prompt) // RUN_TOKENS * RUN_TOKENS, RUN_TOKENS):
        parent = hash((parent, array("i", prompt[low : low + RUN_TOKENS]).tobytes()))
        yield parent
