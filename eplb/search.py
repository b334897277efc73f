"""Small changes to placements that cool their hottest ranks, many rows at once. NumPy only.

A row is a part of a layer that is balanced on its own (`Layout.num_domains` of them). Experts are numbered inside their row. Copies of an
expert share its load evenly, as `moe.router` does.
"""

from dataclasses import dataclass

import numpy as np

_TIE = 1e-9  # relative: a smaller gain is none
_ROOM = 0.97  # of the limit: two ranks that a swap leaves below it are cool enough, and the nearer swap wins


@dataclass
class _Heat:
    """Loads of some rows as they are now."""

    share: np.ndarray  # [rows, experts] load of one copy
    slot: np.ndarray  # [rows, ranks, slots] the same by slot
    rank: np.ndarray  # [rows, ranks]
    hot: np.ndarray  # [rows] the hottest rank
    peak: np.ndarray  # [rows] its load

    def only(self, mask: np.ndarray) -> "_Heat":
        return _Heat(*(part[mask] for part in vars(self).values()))


class Search:
    """`run()` changes `slots` in place, one change a row and round, until no rank is above its row's limit or nothing helps.

    A change is a swap that cools the hottest rank and makes no other one as hot. Where no swap helps, or the hottest rank has an expert
    with too few copies, one copy is passed on instead, from an expert with more copies than wanted to one with fewer: a single move.
    With two slots a rank and the wanted numbers of copies, swaps end at the lowest peak that there is: if none helps, everything lighter
    than the lighter one of the hottest rank is paired with something no lighter than its heavier one, so no pairing has room for both.
    """

    def __init__(
        self, load: np.ndarray, slots: np.ndarray, limit: np.ndarray, wanted_copies: np.ndarray, node_of_rank: np.ndarray, far_cost: float
    ):
        """load, wanted_copies `[rows, experts]`; slots `[rows, ranks, slots]`, experts; limit `[rows]`; node_of_rank `[rows, ranks]`.

        far_cost: what a move between nodes costs, in moves inside one.
        """
        num_rows, num_experts = load.shape
        self.load, self.slots, self.limit, self.wanted = load, slots, limit, wanted_copies
        self.node, self.far_cost = node_of_rank, far_cost
        flat = slots.reshape(num_rows, -1) + np.arange(num_rows)[:, None] * num_experts
        self.num_copies = np.bincount(flat.ravel(), minlength=load.size).reshape(load.shape)

    def run(self, max_changes: int) -> None:
        """A row is left as it is after `max_changes`."""
        rows = np.arange(len(self.load))
        for _ in range(max_changes):
            heat = self._heat(rows)
            above = heat.peak > self.limit[rows]
            rows, heat = rows[above], heat.only(above)
            if not len(rows):
                return
            lacking = np.take_along_axis(self.num_copies[rows] < self.wanted[rows], self.slots[rows, heat.hot], -1).any(-1)
            done = np.zeros(len(rows), bool)
            done[~lacking] = self._swap(rows[~lacking], heat.only(~lacking))
            if not done.all():
                done[~done] = self._pass_on(rows[~done], heat.only(~done))
            rows = rows[done]

    def _heat(self, rows: np.ndarray) -> _Heat:
        share = self.load[rows] / self.num_copies[rows]
        at, slots = np.arange(len(rows)), self.slots[rows]
        slot = share[at[:, None, None], slots]
        rank = slot.sum(-1)
        hot = rank.argmax(-1)
        return _Heat(share, slot, rank, hot, rank[at, hot])

    def _swap(self, rows: np.ndarray, heat: _Heat) -> np.ndarray:
        """The best swap of a slot of the hottest rank with any other slot; True where one helps."""
        at, (num_rows, num_ranks, num_slots) = np.arange(len(rows)), heat.slot.shape
        less = heat.slot[at, heat.hot][:, :, None, None] - heat.slot[:, None]  # [rows, hot slots, ranks, slots]
        peak, limit = (part[:, None, None, None] for part in (heat.peak, self.limit[rows]))
        after = np.maximum(peak - less, heat.rank[:, None, :, None] + less)
        # The coolest pair, not the first that is below the limit: it stays below for longer, and fewer moves come of it.
        near = self.node[rows] == self.node[rows, heat.hot][:, None]
        cost = np.where(near, 1.0, self.far_cost)[:, None, :, None]
        score = np.where(after < peak * (1 - _TIE), np.maximum(after, _ROOM * limit) + _TIE * limit * cost, np.inf)
        score[at, :, heat.hot] = np.inf
        score = score.reshape(num_rows, num_slots * num_ranks * num_slots)
        best = score.argmin(-1)
        found = np.isfinite(score[at, best])
        mine, rank, slot = (index[found] for index in np.unravel_index(best, (num_slots, num_ranks, num_slots)))
        here, there = (rows[found], heat.hot[found], mine), (rows[found], rank, slot)
        self.slots[here], self.slots[there] = self.slots[there], self.slots[here]
        return found

    def _pass_on(self, rows: np.ndarray, heat: _Heat) -> np.ndarray:
        """One copy of the expert that misses it least goes to the one that needs it most; False where all have what is wanted."""
        load, copies, wanted = self.load[rows], self.num_copies[rows], self.wanted[rows]
        found = (copies != wanted).any(-1)
        giver = np.where(copies > wanted, load / np.maximum(copies - 1, 1), np.inf).argmin(-1)
        taker = np.where(copies < wanted, heat.share, -1.0).argmax(-1)
        held = np.where(self.slots[rows] == giver[:, None, None], heat.rank[:, :, None], np.inf)
        coolest = np.unravel_index(held.reshape(len(rows), held[0].size).argmin(-1), held.shape[1:])
        rows, giver, taker = rows[found], giver[found], taker[found]
        self.slots[rows, coolest[0][found], coolest[1][found]] = taker
        self.num_copies[rows, giver] -= 1
        self.num_copies[rows, taker] += 1
        return found
