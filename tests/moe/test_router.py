"""Logical to physical experts."""

import torch

from eplb.placement import Placement, initial_placement
from moe.router import replicas_of, update_replicas

CPU = torch.device("cpu")


def random_topk(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    return torch.rand(num_tokens, num_experts).argsort(-1)[:, :top_k]


def test_without_replicas_only_the_numbering_changes():
    placement = Placement(4, 2, (2, 0, 3, 1))
    topk = torch.tensor([[0, 1], [2, 3]])
    assert replicas_of(placement, CPU).physical(topk).tolist() == [[1, 3], [0, 2]]


def test_tokens_take_replicas_in_turn():
    replicas = replicas_of(Placement(3, 2, (0, 1, 2, 0, 0, 1)), CPU)
    assert replicas.physical(torch.tensor([[0], [0], [0], [0]]))[:, 0].tolist() == [0, 3, 4, 0]
    assert replicas.physical(torch.tensor([[1], [1], [1], [2]]))[:, 0].tolist() == [1, 5, 1, 2]


def test_ranks_begin_with_different_replicas():
    placement = Placement(3, 2, (0, 1, 2, 0, 0, 1))
    first = [replicas_of(placement, CPU, rank=rank).physical(torch.tensor([[0, 1, 2]]))[0].tolist() for rank in range(6)]
    assert first == [[0, 1, 2], [3, 5, 2], [4, 1, 2], [0, 5, 2], [3, 1, 2], [4, 5, 2]]
    second = replicas_of(placement, CPU, rank=2).physical(torch.tensor([[0], [0], [0], [0]]))[:, 0]
    assert second.tolist() == [4, 0, 3, 4]


def test_tokens_stay_on_their_node_as_far_as_replicas_stay_even():
    # Experts 0 and 1 have a replica on each of two nodes; 2 has both on the first one, which also takes those of 3 on the second.
    placement = Placement(4, 4, (0, 1, 2, 2, 0, 1, 3, 3), num_nodes=2)
    first = [[sorted(turns) for turns in replicas_of(placement, CPU, rank=rank).slots[:3].tolist()] for rank in (0, 3)]
    assert first == [[[0, 0], [1, 1], [2, 3]], [[4, 4], [5, 5], [2, 3]]]
    for num_nodes in (2, 3, 4):
        slots = torch.cat((torch.arange(6), torch.randint(6, (18,))))[torch.randperm(24)]
        placement = Placement(6, 12, tuple(slots.tolist()), num_nodes)
        taken, local = torch.zeros(24), torch.zeros(6)
        for rank in range(12):
            for expert, turns in enumerate(placement.turns_of(rank)):
                taken += torch.bincount(torch.tensor(turns), minlength=24) / len(turns)
                local[expert] += sum(slot * num_nodes // 24 == rank * num_nodes // 12 for slot in turns) / len(turns)
        for expert, replicas in enumerate(placement.log2phy):
            assert torch.allclose(taken[list(replicas)], torch.tensor(12 / len(replicas)))
            on_node = torch.bincount(torch.tensor(replicas) * num_nodes // 24, minlength=num_nodes) / len(replicas)
            assert torch.allclose(local[expert], 12 * on_node.clamp(max=1 / num_nodes).sum()), "more could have stayed"


def test_an_update_is_as_good_as_new_and_keeps_its_storage():
    for rank in (0, 3):
        replicas = replicas_of(initial_placement(5, 3, 4), CPU, rank=rank, width=5)
        slots, counts = replicas.slots, replicas.counts
        for phy2log in ((0, 1, 2, 3, 4, 4, 4, 4, 4), (4, 3, 2, 1, 0, 0, 1, 2, 3)):
            update_replicas(replicas, Placement(5, 3, phy2log), rank=rank)
            topk = random_topk(50, 3, 5)
            fresh = replicas_of(Placement(5, 3, phy2log), CPU, rank=rank)
            assert torch.equal(replicas.physical(topk), fresh.physical(topk))
        assert replicas.slots is slots and replicas.counts is counts


def test_every_choice_is_a_replica_and_all_are_used_evenly():
    for num_ranks, num_redundant in ((1, 0), (3, 0), (4, 5), (8, 40)):
        placement = initial_placement(16, num_ranks, num_redundant)
        topk = random_topk(960, 4, 16)
        physical = replicas_of(placement, CPU).physical(topk)
        assert torch.equal(torch.tensor(placement.phy2log)[physical], topk)
        assert all(len(set(row)) == 4 for row in physical.tolist())
        load = torch.bincount(physical.flatten(), minlength=placement.num_physical)
        for slots in placement.log2phy:
            mean = load[list(slots)].float().mean()
            assert ((load[list(slots)] - mean).abs() < 0.35 * mean).all()


def test_no_tokens():
    for num_redundant in (0, 3):
        empty = replicas_of(initial_placement(8, 2, num_redundant), CPU).physical(torch.zeros(0, 2, dtype=torch.int64))
        assert empty.shape == (0, 2) and empty.dtype == torch.int64
