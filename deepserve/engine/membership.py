"""Which ranks make up an instance that outlives them: agreed on through its rendezvous store, one *epoch* after another.

A *member* is one life of a rank. The life that follows a dead one is another member, so nobody takes news of the one for news of the
other: number `rank + LIVES_APART * life`. In every epoch all members step together. When one is lost, when one leaves, or when new ones
apply, the others meet for the next epoch:

    here      each member that goes on says so in the store
    members   one of them writes down who is in, the first to do so; whoever is missing is out for good
    gather    all that are in wait for each other, the new ones too, and then open their groups

If somebody dies meanwhile, those who notice meet for the epoch after that.
"""

import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from deepserve.spawn import LIVES_APART
from hw.groups import PeerLost
from hw.topology import ParallelConfig

GRACE_S = 10.0  # for a member to appear that nobody knows to be dead
_POLL_S = 0.005


class Excluded(PeerLost):
    """The others went on without this rank."""


class Membership:
    """What one member knows."""

    def __init__(self, store: Any, parallel: ParallelConfig, rank: int, life: int, lost: Callable[[], Collection[int]]):
        """store: torch.distributed's, of all members. parallel: of epoch 0; later ones may be more. lost: members known to be dead."""
        self._store, self._first, self._known_lost = store, parallel, lost
        self.me = rank + LIVES_APART * life
        self.epoch = 0
        self.members = list(range(parallel.num_ranks))

    @property
    def parallel(self) -> ParallelConfig:
        """Of those who are in. Nodes count as one where they have lost different numbers of ranks."""
        tp, nodes = self._first.tp, [self._rank(member) // self._first.ranks_per_node for member in self.members]
        per_node = [nodes.count(node) for node in sorted(set(nodes))]
        alike = self._first.nodes > 1 and len(set(per_node)) == 1
        return ParallelConfig(len(self.members) // tp, tp, len(per_node) if alike else 1)

    @property
    def rank(self) -> int:
        """Of this member among those who are in."""
        return self.members.index(self.me)

    @property
    def prefix(self) -> str:
        """Of everything in the store that is this epoch's own."""
        return f"epoch{self.epoch}"

    @property
    def lost(self) -> list[int]:
        """Members of this epoch that are known to be dead."""
        known = self._known_lost()
        return [member for member in self.members if member in known]

    def meet(self, leaving: Collection[int] = (), *, planned: bool = False) -> None:
        """Agree on the members of the next epoch and wait until they are there. All that stay call it.

        leaving: DP replicas of this epoch. planned: nobody was lost, so the first one that stays decides and lets in who applied.
        Raises Excluded, and PeerLost if one did not come; then call it again.
        """
        tp = self._first.tp
        stay = [member for at, member in enumerate(self.members) if at // tp not in leaving]
        self.epoch += 1
        self._say_here()
        decided, deadline = f"{self.prefix}/members", time.monotonic() + GRACE_S
        while not self._store.check([decided]):
            late = time.monotonic() > deadline
            here = [member for member in stay if self._is_here(member)]
            known = self._known_lost()
            alive = [member for member in stay if member not in known]
            if late or (set(alive) <= set(here) and (not planned or alive[0] == self.me)):
                found = self._replicas([member for member in here if member in alive])
                self._decide(decided, found, self.applicants() if planned else [])
            time.sleep(_POLL_S)
        self._gather(decided)

    def apply(self) -> None:
        """Become a member: wait until the others let this one in and all are there. Raises PeerLost if one did not come."""
        self._store.set(f"application{self._store.add('applications', 1)}", str(self.me))
        while not self._store.check([f"admission/{self.me}"]):
            time.sleep(_POLL_S)
        self.epoch = int(self._store.get(f"admission/{self.me}"))
        self._say_here()
        self._gather(f"{self.prefix}/members")

    def applicants(self) -> list[int]:
        """Who has applied and may be let in: whole TP groups."""
        keys = [f"application{number + 1}" for number in range(self._store.add("applications", 0))]
        found = [int(self._store.get(key)) for key in keys if self._store.check([key])]
        known = self._known_lost()
        return self._replicas([m for m in found if m not in known and not self._store.check([f"admission/{m}"])])

    def _decide(self, key: str, found: list[int], applicants: list[int]) -> None:
        text = json.dumps(sorted([*found, *applicants], key=self._rank))
        if self._store.compare_set(key, "", text) == text.encode():  # otherwise somebody else was first
            for member in applicants:
                self._store.set(f"admission/{member}", str(self.epoch))

    def _gather(self, decided: str) -> None:
        self.members = json.loads(self._store.get(decided))
        if self.me not in self.members:
            raise Excluded(f"the other ranks of the instance went on without rank {self._rank(self.me)}")
        deadline = time.monotonic() + GRACE_S
        while absent := [member for member in self.members if not self._is_here(member)]:
            if set(absent) & set(self._known_lost()) or time.monotonic() > deadline:
                raise PeerLost(f"rank {self._rank(absent[0])} did not come to {self.prefix}")
            time.sleep(_POLL_S)

    def _say_here(self) -> None:
        self._store.set(f"{self.prefix}/here/{self.me}", "")

    def _is_here(self, member: int) -> bool:
        return self._store.check([f"{self.prefix}/here/{member}"])

    def _rank(self, member: int) -> int:
        return member % LIVES_APART

    def _replicas(self, members: Sequence[int]) -> list[int]:
        """Those whose TP group is complete."""
        groups = [(member // LIVES_APART, self._rank(member) // self._first.tp) for member in members]
        return [member for member, group in zip(members, groups, strict=True) if groups.count(group) == self._first.tp]
