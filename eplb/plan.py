"""From loads and the current placement to a better one that is cheap to reach. Pure; NumPy only.

The target is the balance of DeepSeek's algorithm (`eplb.pack`) less a tolerance. Layers that reach it already stay as they are; others
are changed slot by slot from where they are (`eplb.search`); what cannot be mended so, or drifted far, is packed anew, with ranks and
slots numbered to keep what they hold. No layer ends hotter than `1 + tolerance` times DeepSeek's hottest rank.
"""

from dataclasses import dataclass, replace

import numpy as np

from eplb.pack import Layout, rebalance, replicate
from eplb.search import Search

SAME_RANK, SAME_NODE, OTHER_NODE = 0, 1, 2


@dataclass(frozen=True)
class Moves:
    """Copies of one expert's weights into a slot, from a slot that held it before. All `[num_moves]` int64."""

    layer: np.ndarray
    source: np.ndarray  # physical
    target: np.ndarray  # physical
    reach: np.ndarray  # SAME_RANK, SAME_NODE or OTHER_NODE

    def count(self, reach: int) -> int:
        return int((self.reach == reach).sum())

    @property
    def num_remote(self) -> int:
        """Moves that leave a rank."""
        return int((self.reach != SAME_RANK).sum())


@dataclass(frozen=True)
class Plan:
    """A placement of every layer, what it should bring under the loads it was made for, and how to get there."""

    phy2log: np.ndarray  # [layers, num_physical] int64
    peak_before: np.ndarray  # [layers] load of the hottest rank
    peak_after: np.ndarray  # [layers]
    mean: np.ndarray  # [layers] load of a rank
    moves: Moves

    @property
    def balancedness_before(self) -> np.ndarray:
        return _ratio(self.mean, self.peak_before)

    @property
    def balancedness_after(self) -> np.ndarray:
        return _ratio(self.mean, self.peak_after)

    def only(self, layers: np.ndarray, current: np.ndarray) -> "Plan":
        """The same for layers where the mask `[layers]` is True; the others stay at `current` `[layers, num_physical]`."""
        kept = layers[self.moves.layer]
        return replace(
            self,
            phy2log=np.where(layers[:, None], self.phy2log, current),
            peak_after=np.where(layers, self.peak_after, self.peak_before),
            moves=Moves(*(part[kept] for part in vars(self.moves).values())),
        )


def rank_loads(load: np.ndarray, phy2log: np.ndarray, num_ranks: int) -> np.ndarray:
    """`[layers, num_ranks]` fp64 from load `[layers, num_logical]` and phy2log `[layers, num_physical]`; copies share evenly."""
    share = np.take_along_axis(load / np.maximum(_num_copies(phy2log, load.shape[-1]), 1), phy2log, -1)
    return share.reshape(len(load), num_ranks, -1).sum(-1)


def balancedness(rank_load: np.ndarray) -> np.ndarray:
    """Mean over ranks / max over ranks, 1 where there is no load: `[...]` from `[..., num_ranks]`."""
    return _ratio(rank_load.mean(-1), rank_load.max(-1))


def plan(
    load: np.ndarray, current: np.ndarray, layout: Layout, *, tolerance: float = 0.002, far_cost: float = 4.0, anew: float = 0.1
) -> Plan:
    """load `[layers, num_logical]`, current phy2log `[layers, num_physical]`.

    tolerance: how far above the hottest rank of DeepSeek's algorithm a layer may stay. far_cost: a move between nodes, in moves inside one.
    anew: a layer whose hottest rank is this far above DeepSeek's is packed anew at once. The search stops when no rank is above the limit
    and leaves many just below it, which the next drift of that size lifts above; packing evens out all ranks.
    """
    load = load.astype(np.float64)
    fresh = rebalance(load, layout)
    before = rank_loads(load, current, layout.num_ranks)
    target = rank_loads(load, fresh, layout.num_ranks).max(-1)
    limit, peak = target * (1 + tolerance), before.max(-1)
    phy2log = current.copy()
    wanting = peak > limit
    near = np.flatnonzero(wanting & (peak <= target * (1 + anew)))
    if len(near):
        phy2log[near] = _search(load[near], current[near], limit[near], layout, far_cost)
    failed = rank_loads(load, phy2log, layout.num_ranks).max(-1) > limit
    if failed.any():
        phy2log[failed] = _renumber(fresh[failed], current[failed], layout)
    phy2log[wanting] = align_slots(phy2log[wanting], current[wanting], layout)
    after = rank_loads(load, phy2log, layout.num_ranks)
    return Plan(phy2log, peak, after.max(-1), before.mean(-1), find_moves(current, phy2log, layout))


def align_slots(phy2log: np.ndarray, current: np.ndarray, layout: Layout) -> np.ndarray:
    """Reorder slots inside each rank so that what a rank holds already stays in its slot. All `[layers, num_physical]`."""
    shape = (*phy2log.shape[:-1], layout.num_ranks, layout.slots_per_rank)
    new, old = phy2log.reshape(shape).copy(), current.reshape(shape)
    result = np.full(shape, -1)
    for slot in range(layout.slots_per_rank):
        same = new == old[..., slot : slot + 1]
        found, where = same.any(-1), same.argmax(-1)[..., None]
        result[..., slot] = np.where(found, old[..., slot], -1)
        np.put_along_axis(new, where, np.where(found[..., None], -1, np.take_along_axis(new, where, -1)), -1)
    # As many are left over as there are empty slots; both in order.
    result[result < 0] = new[new >= 0]
    return result.reshape(phy2log.shape)


def find_moves(current: np.ndarray, phy2log: np.ndarray, layout: Layout) -> Moves:
    """What has to be copied from where: nearest holder first, equals in turn so that senders share the work."""
    layer, target = np.nonzero(current != phy2log)
    slots = np.arange(layout.num_physical)
    rank, node = slots // layout.slots_per_rank, slots // layout.slots_per_node
    distance = (rank[:, None] != rank).astype(np.int8) + (node[:, None] != node)  # [target, source]
    holds = current[layer] == phy2log[layer, target][:, None]
    reach = np.where(holds, distance[target], OTHER_NODE + 1)
    nearest = reach == reach.min(-1, initial=OTHER_NODE + 1, keepdims=True)
    turn = target % np.maximum(nearest.sum(-1), 1)
    source = (nearest.cumsum(-1, dtype=np.int32) > turn[:, None]).argmax(-1)
    return Moves(layer, source, target, distance[target, source].astype(np.int64))


def move_batches(moves: Moves, layout: Layout) -> list[list[int]]:
    """Layers that can move together: in each batch, no rank is sent more experts than it has slots in one layer. First fit."""
    ranks = moves.target // layout.slots_per_rank
    batches: list[list[int]] = []
    filled: list[np.ndarray] = []
    for layer in np.unique(moves.layer).tolist():
        incoming = np.bincount(ranks[moves.layer == layer], minlength=layout.num_ranks)
        fitting = (index for index, before in enumerate(filled) if (before + incoming).max() <= layout.slots_per_rank)
        index = next(fitting, len(batches))
        if index == len(batches):
            batches.append([])
            filled.append(np.zeros(layout.num_ranks, np.int64))
        batches[index].append(layer)
        filled[index] += incoming
    return batches


def _num_copies(phy2log: np.ndarray, num_logical: int) -> np.ndarray:
    keys = phy2log + np.arange(len(phy2log))[:, None] * num_logical
    return np.bincount(keys.ravel(), minlength=len(phy2log) * num_logical).reshape(-1, num_logical)


def _ratio(mean: np.ndarray, peak: np.ndarray) -> np.ndarray:
    return np.divide(mean, peak, out=np.ones_like(mean), where=peak > 0)


def _search(load: np.ndarray, current: np.ndarray, limit: np.ndarray, layout: Layout, far_cost: float) -> np.ndarray:
    """The placements after small changes inside each domain; layers whose domains do not hold whole groups are left as they are."""
    num_layers, num_domains = len(load), layout.num_domains
    slots = current.reshape(num_layers, num_domains, -1)
    experts, whole = _domain_experts(slots, layout)
    # A domain whose average rank is above the limit needs other groups.
    domain_load = np.take_along_axis(load, experts.reshape(num_layers, -1), -1).reshape(experts.shape).sum(-1)
    layers = np.flatnonzero(whole & (domain_load.max(-1) <= limit * (layout.num_ranks // num_domains)))
    result = current.copy()
    if not len(layers):
        return result
    experts, slots = experts[layers], slots[layers]
    local = np.zeros((len(layers), num_domains, layout.num_logical), np.int64)  # number of each expert in its domain
    np.put_along_axis(local, experts, np.arange(experts.shape[-1]), -1)
    num_rows = len(layers) * num_domains
    rows = np.take_along_axis(local, slots, -1).reshape(num_rows, -1, layout.slots_per_rank)
    row_load = np.take_along_axis(load[layers], experts.reshape(len(layers), -1), -1).reshape(num_rows, -1)
    _, wanted = replicate(row_load, slots.shape[-1])
    node = np.arange(layout.num_ranks) * layout.num_nodes // layout.num_ranks
    node = np.tile(node.reshape(num_domains, -1), (len(layers), 1))
    search = Search(row_load, rows, np.repeat(limit[layers], num_domains), wanted, node, far_cost)
    search.run(max_changes=slots.shape[-1])
    result[layers] = np.take_along_axis(experts, rows.reshape(slots.shape), -1).reshape(len(layers), -1)
    return result


def _domain_experts(slots: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Experts of each domain, ascending, `[layers, num_domains, n]`, and whether a layer's domains all hold whole groups, `[layers]`.

    slots `[layers, num_domains, slots per domain]`. Where they do not, the experts are any.
    """
    held = np.zeros((*slots.shape[:2], layout.num_logical), bool)
    np.put_along_axis(held, slots, True, -1)
    groups = held.reshape(*slots.shape[:2], -1, layout.group_size)
    per_domain = layout.num_logical // layout.num_domains
    whole = (groups.all(-1) == groups.any(-1)).all((1, 2)) & (held.sum(-1) == per_domain).all(-1)
    return np.argsort(~held, axis=-1, kind="stable")[..., :per_domain], whole


def _renumber(fresh: np.ndarray, current: np.ndarray, layout: Layout) -> np.ndarray:
    """The same placements with domains, and ranks inside them, in the order in which they keep most. All `[layers, num_physical]`."""
    per_domain = layout.num_physical // layout.num_domains
    for rows_per_layer, size in ((1, per_domain), (layout.num_domains, layout.slots_per_rank)):
        shape = (len(fresh) * rows_per_layer, -1, size)
        new, old = fresh.reshape(shape), current.reshape(shape)
        new = np.take_along_axis(new, _match(old, new, layout.num_logical)[..., None], 1)
        fresh = new.reshape(fresh.shape)
    return fresh


def _match(old: np.ndarray, new: np.ndarray, num_logical: int) -> np.ndarray:
    """For each old part the new one that shares most with it, first come, first served: `[rows, parts]` from two `[rows, parts, size]`."""
    num_rows, num_parts, _ = old.shape
    rows = np.arange(num_rows)
    held = [np.zeros((num_rows, num_parts, num_logical), np.float32) for _ in range(2)]
    for one_hot, parts in zip(held, (old, new), strict=True):
        np.put_along_axis(one_hot, parts, 1.0, -1)
    shared = held[0] @ held[1].transpose(0, 2, 1)
    match = np.full((num_rows, num_parts), -1)
    taken = np.zeros((num_rows, num_parts), np.float32)
    for count in range(int(shared.max()), -1, -1):  # of experts shared; the pairs that share most come first
        for part in range(num_parts):
            free = shared[:, part] - taken
            chosen = free.argmax(-1)
            here = np.flatnonzero((match[:, part] < 0) & (free[rows, chosen] >= count))
            match[here, part] = chosen[here]
            taken[here, chosen[here]] = np.inf
    return match
