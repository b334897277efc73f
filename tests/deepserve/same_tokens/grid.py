"""Ways to run the same prompts, none of which may change a token: the full grid and a pairwise cover of it."""

from dataclasses import astuple, dataclass
from itertools import combinations, product

KINDS = ("deepserve-tiny", "v2", "v2-lite", "v3", "moonlight")
COMPANIES = ("alone", "16 prompts")
CHUNKS = (7, 64, None)  # most prompt tokens of a sequence in a step; None: prompts are not cut


@dataclass(frozen=True)
class Case:
    """One way."""

    kind: str
    company: str
    chunk: int | None
    prefix_cache: bool
    preempt: bool
    asynchronous: bool = False  # each step is planned before the result of the one before it is known
    num_drafts: int = 0  # that the MTP module makes behind each draw
    adaptive: bool = False  # so many at most
    kernels: str = "native"  # of the CPU: compiled here, or torch's

    def __str__(self) -> str:
        chunk = "whole" if self.chunk is None else f"chunks of {self.chunk}"
        cache = "prefix cache" if self.prefix_cache else "no cache"
        flags = {"preempted": self.preempt, "async": self.asynchronous, "adaptive": self.adaptive, "torch": self.kernels == "torch"}
        drafts = [f"{self.num_drafts} drafts"] if self.num_drafts else []
        return ", ".join((self.kind, self.company, chunk, cache, *(name for name, on in flags.items() if on), *drafts))


FULL = [
    Case(*values, kernels=kernels)
    for values in product(KINDS, COMPANIES, CHUNKS, (True, False), (True, False), (True, False))
    for kernels in ("native", "torch")
]


def pairs(case: Case) -> set[tuple]:
    """Every two settings that the case brings together."""
    return set(combinations(enumerate(astuple(case)), 2))


# Any two settings of different columns meet in one of these.
PAIRWISE = [
    Case("deepserve-tiny", "16 prompts", 7, True, True, True),
    Case("deepserve-tiny", "alone", 64, False, True, False, kernels="torch"),
    Case("deepserve-tiny", "16 prompts", None, False, False, True),
    Case("v2", "16 prompts", 7, False, True, False),
    Case("v2", "16 prompts", 64, True, False, False, kernels="torch"),
    Case("v2", "alone", None, True, True, True),
    Case("v2-lite", "alone", 7, False, False, False),
    Case("v2-lite", "16 prompts", 64, True, True, True),
    Case("v2-lite", "16 prompts", None, False, True, False, kernels="torch"),
    Case("v3", "16 prompts", 7, True, False, False),
    Case("v3", "16 prompts", 64, False, True, True),
    Case("v3", "alone", None, True, True, True, kernels="torch"),
    Case("moonlight", "16 prompts", 7, False, True, False, kernels="torch"),
    Case("moonlight", "alone", 64, True, False, True),
    Case("moonlight", "16 prompts", None, True, True, True),
]

# With drafts: of the shipped model most are accepted, of the random one next to none.
DRAFTED = [
    Case(*values, num_drafts, adaptive)
    for values in product(("deepserve-tiny", "v3"), COMPANIES, CHUNKS, (True, False), (True, False), (True, False))
    for num_drafts in (1, 2, 4)
    for adaptive in (True, False)
]
DRAFTED_PAIRWISE = [
    Case("deepserve-tiny", "16 prompts", 7, True, True, False, 4, False),
    Case("deepserve-tiny", "alone", 64, False, False, True, 1, True),
    Case("deepserve-tiny", "16 prompts", None, False, False, True, 2, False),
    Case("deepserve-tiny", "alone", None, False, True, False, 4, True),
    Case("v3", "alone", 7, True, False, True, 2, True),
    Case("v3", "16 prompts", 64, True, True, False, 2, True),
    Case("v3", "16 prompts", None, False, False, True, 4, False),
    Case("v3", "alone", 64, True, True, False, 1, False),
    Case("v3", "16 prompts", 7, False, True, True, 1, False),
    Case("deepserve-tiny", "16 prompts", 64, False, False, False, 4, False),
    Case("v3", "16 prompts", None, True, True, True, 1, True),
]
