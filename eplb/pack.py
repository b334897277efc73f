"""Placements made from loads alone: replicate the hottest experts, then pack the replicas evenly. NumPy only.

This is DeepSeek's algorithm (arXiv 2412.19437, section 3.4; its public implementation is called EPLB). Where the nodes divide the expert
groups of a group-limited gate, it is *hierarchical*: groups are packed on nodes first, so that a token's experts stay on few nodes.
Otherwise it is *global*, which is the same thing with one group and one node.

It knows nothing of what ranks hold now, so it moves nearly everything whenever loads change a little: `eplb.plan` starts from it and
moves less.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """Sizes of every layer's placement. Ranks of a node are neighbours, and so are the slots of a rank. Raises ValueError."""

    num_logical: int
    num_ranks: int
    slots_per_rank: int
    num_nodes: int = 1
    num_groups: int = 1  # of the gate

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.num_physical < self.num_logical:
            raise ValueError(f"{self.num_ranks} ranks of {self.slots_per_rank} slots cannot hold {self.num_logical} experts")
        if self.num_ranks % self.num_nodes:
            raise ValueError(f"{self.num_ranks} ranks do not divide over {self.num_nodes} nodes")
        if self.num_logical % self.num_groups:
            raise ValueError(f"{self.num_logical} experts do not divide into {self.num_groups} groups")

    @property
    def num_physical(self) -> int:
        return self.num_ranks * self.slots_per_rank

    @property
    def slots_per_node(self) -> int:
        return self.num_physical // self.num_nodes

    @property
    def num_domains(self) -> int:
        """Parts of a layer that are packed apart: its nodes if hierarchical, else 1."""
        return self.num_nodes if self.num_groups % self.num_nodes == 0 else 1

    @property
    def group_size(self) -> int:
        """Experts that stay together on one domain; packing a single domain needs no groups."""
        return self.num_logical // self.num_groups if self.num_domains > 1 else self.num_logical


def replicate(load: np.ndarray, num_physical: int) -> tuple[np.ndarray, np.ndarray]:
    """One copy of each expert, then one more of whichever has the highest load per copy, until the slots are used up.

    load: `[rows, num_logical]`. Returns phy2log `[rows, num_physical]` and num_replicas `[rows, num_logical]`, int64.
    """
    num_rows, num_logical = load.shape
    rows = np.arange(num_rows)
    phy2log = np.empty((num_rows, num_physical), np.int64)
    phy2log[:, :num_logical] = np.arange(num_logical)
    num_replicas = np.ones((num_rows, num_logical), np.int64)
    share = load.astype(np.float64)
    for slot in range(num_logical, num_physical):
        hottest = share.argmax(-1)
        phy2log[:, slot] = hottest
        num_replicas[rows, hottest] += 1
        share[rows, hottest] = load[rows, hottest] / num_replicas[rows, hottest]
    return phy2log, num_replicas


def balanced_packing(load: np.ndarray, num_packs: int) -> np.ndarray:
    """Items, heaviest first, each to the lightest pack that has room; packs hold equally many.

    load: `[rows, num_items]`. Returns the item at each place of each pack, in order of arrival: `[rows, num_packs, items_per_pack]` int64.
    """
    num_rows, num_items = load.shape
    items_per_pack = num_items // num_packs
    assert items_per_pack * num_packs == num_items, f"{num_items} items over {num_packs} packs"
    if items_per_pack == 1:
        return np.tile(np.arange(num_items), (num_rows, 1))[:, :, None]
    rows = np.arange(num_rows)
    packs = np.empty((num_rows, num_packs, items_per_pack), np.int64)
    filled = np.zeros((num_rows, num_packs), np.int64)
    weight = np.zeros((num_rows, num_packs))  # infinite once full
    for item in np.argsort(-load, axis=-1, kind="stable").T:
        lightest = weight.argmin(-1)
        place = filled[rows, lightest]
        packs[rows, lightest, place] = item
        filled[rows, lightest] += 1
        weight[rows, lightest] = np.where(place + 1 == items_per_pack, np.inf, weight[rows, lightest] + load[rows, item])
    return packs


def assign_groups(load: np.ndarray, layout: Layout) -> np.ndarray:
    """Experts of each domain, by group, from load `[layers, num_logical]`: `[layers, num_domains, num_logical / num_domains]` int64."""
    groups = balanced_packing(load.reshape(len(load), -1, layout.group_size).sum(-1), layout.num_domains)
    experts = groups[..., None] * layout.group_size + np.arange(layout.group_size)
    return experts.reshape(len(load), layout.num_domains, -1)


def rebalance(load: np.ndarray, layout: Layout) -> np.ndarray:
    """phy2log `[layers, num_physical]` int64 of the best balance this algorithm finds for load `[layers, num_logical]`."""
    return pack_domains(load, assign_groups(load, layout), layout).reshape(len(load), -1)


def pack_domains(load: np.ndarray, experts: np.ndarray, layout: Layout) -> np.ndarray:
    """Replicate and pack inside each domain; experts as `assign_groups` returns them.

    Returns the logical expert of each slot, `[layers, num_domains, ranks per domain, slots_per_rank]` int64.
    """
    num_layers, num_domains, per_domain = experts.shape
    local = np.take_along_axis(load, experts.reshape(num_layers, -1), -1).reshape(-1, per_domain)
    phy2local, num_replicas = replicate(local, layout.num_physical // num_domains)
    per_copy = np.take_along_axis(local / num_replicas, phy2local, -1)
    packs = balanced_packing(per_copy, layout.num_ranks // num_domains)
    phy2local = np.take_along_axis(phy2local, packs.reshape(len(packs), -1), -1)
    phy2log = np.take_along_axis(experts.reshape(-1, per_domain), phy2local, -1)
    return phy2log.reshape(num_layers, num_domains, -1, layout.slots_per_rank)
