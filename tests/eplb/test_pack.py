"""DeepSeek's algorithm: its published example, and what must hold of any result."""

import itertools

import numpy as np
import pytest

from eplb.pack import Layout, assign_groups, balanced_packing, rebalance, replicate


def test_published_example():
    """Two layers of 12 experts in 4 groups, 16 slots on 8 ranks of 2 nodes: loads and result as the README of EPLB prints them."""
    load = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    assert rebalance(load, Layout(num_logical=12, num_ranks=8, slots_per_rank=2, num_nodes=2, num_groups=4)).tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


def test_replicas_go_where_the_load_per_copy_is_highest():
    phy2log, num_replicas = replicate(np.array([[9.0, 4.0, 2.0], [1.0, 1.0, 1.0]]), 6)
    # 9 4 2 -> 4.5 4 2 -> 3 4 2 -> 3 2 2; equals take turns from the first.
    assert phy2log.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 0, 1, 2]]
    assert num_replicas.tolist() == [[3, 2, 1], [2, 2, 2]]


def test_no_other_numbers_of_replicas_have_a_lower_peak():
    for _ in range(50):
        load = np.random.gamma(0.5, size=(1, 4))
        _, num_replicas = replicate(load, 9)
        peaks = [
            max(share / count for share, count in zip(load[0], counts, strict=True))
            for counts in itertools.product(range(1, 7), repeat=4)
            if sum(counts) == 9
        ]
        assert (load / num_replicas).max() == pytest.approx(min(peaks))


def test_packing_fills_the_lightest_pack_first():
    packs = balanced_packing(np.array([[7.0, 1.0, 5.0, 3.0, 2.0, 6.0]]), 2)
    # By weight 7 6 5 3 2 1, that is items 0 5 2 3 4 1: 7 | 6, then 5 joins 6 (11), 3 and 2 join 7 (12, full), 1 is left.
    assert packs.tolist() == [[[0, 3, 4], [5, 2, 1]]]


def random_layout() -> Layout:
    num_nodes, groups_per_node = np.random.choice([1, 2, 3]), np.random.choice([1, 2])
    num_logical = int(num_nodes * groups_per_node * np.random.randint(1, 9))
    num_ranks = int(num_nodes * np.random.randint(1, 6))
    slots_per_rank = -(-num_logical // num_ranks) + int(np.random.randint(0, 3))
    num_groups = int(num_nodes * groups_per_node) if np.random.rand() < 0.7 else 1
    return Layout(num_logical, num_ranks, slots_per_rank, int(num_nodes), num_groups)


def test_every_expert_has_a_slot_and_groups_stay_on_a_node():
    for _ in range(200):
        layout = random_layout()
        load = np.random.gamma(1.0, size=(3, layout.num_logical))
        for row in rebalance(load, layout):
            assert set(row.tolist()) == set(range(layout.num_logical)) and len(row) == layout.num_physical
            if layout.num_domains > 1:
                groups = row.reshape(layout.num_nodes, -1) // (layout.num_logical // layout.num_groups)
                held = [set(node.tolist()) for node in groups]
                assert sum(map(len, held)) == layout.num_groups == len(set.union(*held))


def test_groups_are_packed_only_where_nodes_divide_them():
    assert [Layout(256, 32, 9, nodes, 8).num_domains for nodes in (1, 2, 4, 16)] == [1, 2, 4, 1]
    assert assign_groups(np.ones((2, 256)), Layout(256, 32, 9, 4, 8)).shape == (2, 4, 64)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1), "num_logical must be at least 1, got 0"),
        ((9, 4, 2), "4 ranks of 2 slots cannot hold 9 experts"),
        ((8, 4, 2, 3), "4 ranks do not divide over 3 nodes"),
        ((8, 4, 2, 1, 3), "8 experts do not divide into 3 groups"),
    ],
)
def test_wrong_layouts(sizes: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        Layout(*sizes)
