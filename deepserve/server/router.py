"""Which engine rank runs a request: the one where it costs least, as long as the ranks stay level.

Cost in tokens: what is queued there, what decoding there weighs, and the part of this prompt that the rank has not computed before. A rank
with clearly more sequences than the least busy one is left out whatever it has cached: in lockstep the busiest rank sets the pace.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar
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


class Prompt(NamedTuple):
    """A prompt as the router sees it; made once for a request, looked at whenever it may go somewhere."""

    num_tokens: int
    runs: tuple[int, ...]  # a hash for every whole run, which also stands for all before it

    @classmethod
    def of(cls, token_ids: list[int], cache_salt: str = "") -> "Prompt":
        return cls(len(token_ids), tuple(_runs(token_ids, cache_salt)))


class Router:
    """Remembers which prefixes were sent where; the ranks' own caches may have dropped them since, which costs time and nothing else."""

    def __init__(self):
        self._turn = 0
        self._prefixes: WeakKeyDictionary[Candidate, OrderedDict[int, None]] = WeakKeyDictionary()

    def pick(self, candidates: Iterable[C], prompt: Prompt, *, level: bool = True) -> C | None:
        """None when there is nobody to pick. level: whether ranks must stay so, as where they decode in lockstep."""
        ranks = list(candidates)
        if len(ranks) <= 1:
            return ranks[0] if ranks else None
        if level:
            least = min(rank.num_sequences for rank in ranks)
            ranks = [rank for rank in ranks if rank.num_sequences <= least + max(SLACK_SEQUENCES, SLACK_SHARE * least)]
        costs = [self._cost(rank, prompt) for rank in ranks]
        best = min(costs)
        # The turn counts picks, not positions, so a rank that joins or leaves does not favour anyone.
        equals = [rank for rank, cost in zip(ranks, costs, strict=True) if cost == best]
        self._turn += 1
        return equals[self._turn % len(equals)]

    def num_fresh(self, rank: Candidate, prompt: Prompt) -> int:
        """Tokens of the prompt that the rank has not seen, as far as is known here."""
        known = self._prefixes.get(rank, ())
        num_cached = 0
        for run in prompt.runs:
            if run not in known:
                break
            num_cached += RUN_TOKENS
        return prompt.num_tokens - num_cached

    def remember(self, rank: Candidate, prompt: Prompt) -> None:
        """The prompt goes there."""
        known = self._prefixes.setdefault(rank, OrderedDict())
        for run in reversed(prompt.runs):  # the head of a prefix is the last to be forgotten
            known[run] = None
            known.move_to_end(run)
        while len(known) * RUN_TOKENS > rank.num_cache_tokens:
            known.popitem(last=False)

    def _cost(self, rank: Candidate, prompt: Prompt) -> int:
        fresh = self.num_fresh(rank, prompt)
        cost = rank.num_queued_tokens + SEQUENCE_TOKENS * rank.num_sequences + fresh
        return cost + (FULL_TOKENS if rank.num_free_tokens < fresh else 0)


def _runs(token_ids: list[int], cache_salt: str) -> Iterator[int]:
    parent = hash(cache_salt)
    for low in range(0, len(token_ids) // RUN_TOKENS * RUN_TOKENS, RUN_TOKENS):
        parent = hash((parent, array("i", token_ids[low : low + RUN_TOKENS]).tobytes()))
        yield parent
