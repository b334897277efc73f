"""Moves over gloo: every slot ends with the right bytes, and nothing changes before its layer is complete."""

import os
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from eplb.migrate import Migration
from eplb.pack import Layout
from eplb.plan import find_moves, move_batches
from hw.groups import Group, PeerLost, Rendezvous
from tests.hw.ranks import Died, Ranks

LAYERS, SLICE_BYTES = 3, 700
PARTS = ((24, 16, torch.float8_e4m3fn), (3, 2, torch.float32), (8, 12, torch.bfloat16))  # of one expert: 384 + 24 + 192 bytes


def expert(layer: int, logical: int) -> list[torch.Tensor]:
    """Its weights: random, and known to every process."""
    generator = torch.Generator().manual_seed(1000 * layer + logical)
    return [torch.randn(rows, cols, generator=generator).to(dtype) for rows, cols, dtype in PARTS]


def held(layer: int, slots: list[int]) -> list[torch.Tensor]:
    return [torch.stack(parts) for parts in zip(*(expert(layer, logical) for logical in slots), strict=True)]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(some, others, strict=True))


@cache
def world(rendezvous: Rendezvous, rank: int, size: int) -> Group:
    return Group("world", list(range(size)), rank, rendezvous)


def buffer(layout: Layout) -> torch.Tensor:
    return torch.empty(layout.slots_per_rank * 600, dtype=torch.uint8)


class Counted:
    """A group that keeps how much a rank sent and received at a time."""

    def __init__(self, group: Group):
        self.rank, self.size, self._group, self.most = group.rank, group.size, group, 0

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        self.most = max(self.most, sum(send), sum(receive))
        return self._group.all_to_all(x, send, receive)


def migrate(
    rendezvous, rank: int, layout: Layout, current: np.ndarray, wanted: np.ndarray, slice_bytes: int
) -> tuple[list[list[int]], int]:
    """Batches in order of completion, and the most bytes at a time; asserts on the way."""
    group = Counted(world(rendezvous, rank, layout.num_ranks))
    mine = slice(rank * layout.slots_per_rank, (rank + 1) * layout.slots_per_rank)
    weights = {layer: held(layer, current[layer, mine].tolist()) for layer in range(LAYERS)}
    addresses = {layer: [tensor.data_ptr() for tensor in tensors] for layer, tensors in weights.items()}
    migration, order = (
        Migration(weights, find_moves(current, wanted, layout), layout, group, buffer=buffer(layout), slice_bytes=slice_bytes),
        [],
    )
    while not migration.done:
        order += [batch] if (batch := migration.advance()) else []
        for one in range(LAYERS):
            placement = wanted if any(one in batch for batch in order) else current
            assert same(weights[one], held(one, placement[one, mine].tolist())), (rank, one, order)
    assert addresses == {layer: [tensor.data_ptr() for tensor in tensors] for layer, tensors in weights.items()}
    return order, group.most


def random_map(layout: Layout) -> np.ndarray:
    rows = []
    for _ in range(LAYERS):
        extra = np.random.randint(layout.num_logical, size=layout.num_physical - layout.num_logical)
        rows.append(np.random.permutation(np.concatenate([np.arange(layout.num_logical), extra])))
    return np.stack(rows)


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, ranks_of: Callable[[int], Ranks]) -> Ranks:
    return ranks_of(request.param)


def test_every_slot_gets_its_expert(ranks: Ranks):
    layout = Layout(num_logical=9, num_ranks=ranks.size, slots_per_rank=6)
    for slice_bytes in (100_000, SLICE_BYTES, 600, 599, 50):
        current, wanted = random_map(layout), random_map(layout)
        wanted[1] = current[1]  # a layer without moves
        for order, most in ranks.run(migrate, layout, current, wanted, slice_bytes):
            assert order == move_batches(find_moves(current, wanted, layout), layout) and 0 < most <= slice_bytes
            assert [layer for batch in order for layer in batch] == [0, 2]


def test_moves_inside_a_rank_use_no_wire(ranks: Ranks):
    layout = Layout(num_logical=2 * ranks.size, num_ranks=ranks.size, slots_per_rank=3)
    current = np.tile([[2 * rank, 2 * rank + 1, 2 * rank] for rank in range(ranks.size)], (LAYERS, 1, 1)).reshape(LAYERS, -1)
    wanted = current.reshape(LAYERS, -1, 3)[:, :, [1, 0, 1]].reshape(LAYERS, -1)  # all change, two of them in exchange
    for order, most in ranks.run(migrate, layout, current, wanted, SLICE_BYTES):
        assert order == [[0], [1], [2]] and most == 0


def test_layers_that_fit_the_buffer_move_together(ranks: Ranks):
    layout = Layout(num_logical=2 * ranks.size, num_ranks=ranks.size, slots_per_rank=2)
    current = np.tile(np.arange(2 * ranks.size), (LAYERS, 1))
    wanted = current.copy()
    wanted[:, [0, 2]] = wanted[:, [2, 0]]  # one expert to each of two ranks; two layers fill the buffer
    assert [order for order, _ in ranks.run(migrate, layout, current, wanted, SLICE_BYTES)] == [[[0, 1], [2]]] * ranks.size


def test_no_moves():
    layout = Layout(4, 1, 4)
    current = np.arange(4)[None]
    migration = Migration(
        {}, find_moves(current, current, layout), layout, Group("alone", [0], 0, None), buffer=buffer(layout), slice_bytes=1
    )
    assert migration.done


def test_one_rank_alone():
    layout = Layout(3, 1, 4)
    current, wanted = np.array([[0, 1, 2, 2]]), np.array([[1, 0, 2, 1]])
    weights = {0: held(0, current[0].tolist())}
    migration = Migration(
        weights, find_moves(current, wanted, layout), layout, Group("alone", [0], 0, None), buffer=buffer(layout), slice_bytes=10
    )
    assert migration.advance() == [0] and migration.done
    assert same(weights[0], held(0, wanted[0].tolist()))


def die_midway(rendezvous, rank: int, layout: Layout, current: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether the weights of a survivor are as before."""
    group = Group("doomed", list(range(layout.num_ranks)), rank, rendezvous)
    mine = slice(rank * layout.slots_per_rank, (rank + 1) * layout.slots_per_rank)
    weights = {layer: held(layer, current[layer, mine].tolist()) for layer in range(LAYERS)}
    migration = Migration(weights, find_moves(current, wanted, layout), layout, group, buffer=buffer(layout), slice_bytes=50)
    migration.advance()
    if rank == 1:
        os._exit(1)
    try:
        while not migration.done:
            migration.advance()
    except PeerLost:
        return same(weights[0], held(0, current[0, mine].tolist()))
    return False


def test_a_lost_peer_leaves_the_layer_as_it_was(tmp_path_factory: pytest.TempPathFactory):
    layout = Layout(6, 2, 3)
    current = np.tile(np.arange(6), (LAYERS, 1))
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        survivor, died = ranks.outcomes(die_midway, layout, current, current[:, ::-1].copy())
    assert survivor is True and isinstance(died, Died)
