"""Logical-to-physical expert maps.

A model has *logical* experts. Each rank has the same number of *physical* slots, numbered rank after rank, and each slot holds a copy
of one logical expert; copies of the same one are its *replicas*. A placement says which slot holds what, in one layer:

    ranks:      |      rank 0      |      rank 1      |      rank 2      |
    physical:   |  0    1    2     |  3    4    5     |  6    7    8     |
    phy2log:    | e0   e1   e2     | e3   e4   e5     | e6   e7   e0     |   8 experts, 9 slots: e0 has two replicas
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The map of one layer; checked when made. `phy2log` is the whole truth, the rest is derived."""

    num_logical: int
    num_ranks: int
    phy2log: tuple[int, ...]  # [num_physical]
    num_nodes: int = 1  # that the ranks are spread over evenly, neighbours together

    def __post_init__(self):
        assert self.num_ranks % self.num_nodes == 0, f"{self.num_ranks} ranks over {self.num_nodes} nodes"
        assert len(self.phy2log) % self.num_ranks == 0, f"{len(self.phy2log)} slots over {self.num_ranks} ranks"
        assert all(0 <= log < self.num_logical for log in self.phy2log), self.phy2log
        missing = set(range(self.num_logical)) - set(self.phy2log)
        assert not missing, f"no slot holds the logical experts {sorted(missing)}"

    @property
    def num_physical(self) -> int:
        return len(self.phy2log)

    @property
    def slots_per_rank(self) -> int:
        return self.num_physical // self.num_ranks

    @cached_property
    def log2phy(self) -> tuple[tuple[int, ...], ...]:
        """Physical slots of each logical expert, ascending."""
        slots: list[list[int]] = [[] for _ in range(self.num_logical)]
        for phy, log in enumerate(self.phy2log):
            slots[log].append(phy)
        return tuple(tuple(found) for found in slots)

    @property
    def max_replicas(self) -> int:
        return max(len(slots) for slots in self.log2phy)

    def turns_of(self, rank: int) -> list[tuple[int, ...]]:
        """Slots of each logical expert in the order in which tokens of a rank take them, over and over: as many as it has replicas.

        Replicas of the rank's node come as often as they can while all replicas of an expert get equally many tokens, if all nodes bring
        equally many. Ranks begin with different ones, since small batches are all first rows.
        """
        found = []
        for slots in self.log2phy:
            mine = slots if self.num_nodes == 1 or len(slots) == 1 else self._shares(slots)[rank * self.num_nodes // self.num_ranks]
            at = rank % len(slots)
            found.append(mine[at:] + mine[:at])
        return found

    def _shares(self, slots: tuple[int, ...]) -> list[tuple[int, ...]]:
        """For each node, which of an expert's slots its tokens take by turns."""
        nodes = [slot // self.slots_per_rank * self.num_nodes // self.num_ranks for slot in slots]
        left = dict.fromkeys(slots, self.num_nodes)  # turns that a slot has to give; a node needs as many as there are slots
        shares: list[list[int]] = []
        for node in range(self.num_nodes):
            local = [slot for slot, at in zip(slots, nodes, strict=True) if at == node]
            shares.append([local[turn % len(local)] for turn in range(min(len(slots), self.num_nodes * len(local)))])
            for slot in shares[node]:
                left[slot] -= 1
        for share in shares:
            while len(share) < len(slots):
                share.append(max(slots, key=left.__getitem__))
                left[share[-1]] -= 1
        return [tuple(share) for share in shares]

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Logical experts of a rank's slots, in slot order."""
        return self.phy2log[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]


def initial_placement(num_logical: int, num_ranks: int, num_redundant: int = 0, num_nodes: int = 1) -> Placement:
    """One copy of each expert in order, then replicas of the first ones until every rank has the same number of slots.

    Any number of ranks works: slots per rank are ceil((num_logical + num_redundant) / num_ranks).
    """
    slots_per_rank = -(-(num_logical + num_redundant) // num_ranks)
    return Placement(num_logical, num_ranks, tuple(phy % num_logical for phy in range(slots_per_rank * num_ranks)), num_nodes)
