"""Collectives against their plain meaning, and what becomes of them when a peer is gone or late."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hw.groups import Group, PeerLost, Rendezvous, open_groups
from hw.topology import ParallelConfig
from tests.hw.ranks import Died, Ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)
# Rows that rank i sends to rank j, of which the first `size` rows and columns count.
TRAFFIC = {
    "even": [[2, 2, 2], [2, 2, 2], [2, 2, 2]],
    "uneven": [[1, 5, 0], [3, 0, 2], [4, 1, 7]],
    "one rank sends": [[3, 2, 4], [0, 0, 0], [0, 0, 0]],
    "one rank receives": [[0, 3, 0], [0, 1, 0], [0, 2, 0]],
    "nothing": [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
}
LENS = {"even": [3, 3, 3], "uneven": [1, 0, 6], "first is empty": [0, 4, 2], "nothing": [0, 0, 0]}


def block(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank brings: random, and known to every process."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(*shape, generator=generator) * 50).to(torch.int32 if dtype is torch.bool else torch.float32).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, ranks_of: Callable[[int], Ranks]) -> Ranks:
    return ranks_of(request.param)


@cache
def world(rendezvous: Rendezvous, rank: int, size: int) -> Group:
    """One group of all ranks per process, for every case."""
    return Group("world", list(range(size)), rank, rendezvous)


def gather_ints(rendezvous, rank, size):
    group = world(rendezvous, rank, size)
    return group.all_gather_ints([rank, -(1 << 60) * rank, 7]), group.all_gather_ints([])


def test_all_gather_ints(ranks: Ranks):
    for wide, empty in ranks.run(gather_ints, ranks.size):
        assert wide == [[rank, -(1 << 60) * rank, 7] for rank in range(ranks.size)]
        assert empty == [[]] * ranks.size


def send_bytes(rendezvous, rank, size, data, root):
    return world(rendezvous, rank, size).broadcast_bytes(data if rank == root else None, root)


@pytest.mark.parametrize("data", [b"", b"\0", bytes(range(256)) * 1000], ids=len)
def test_broadcast_bytes(ranks: Ranks, data: bytes):
    for root in (0, ranks.size - 1):
        assert ranks.run(send_bytes, ranks.size, data, root) == [data] * ranks.size


def send_tensor(rendezvous, rank, size, dtype, shape, root):
    tensor = block(rank, *shape, dtype=dtype)
    assert world(rendezvous, rank, size).broadcast(tensor, root) is tensor
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (0, 4)], ids=str)
def test_broadcast(ranks: Ranks, dtype: torch.dtype, shape: tuple[int, ...]):
    root = ranks.size - 1
    expected = block(root, *shape, dtype=dtype)
    assert all(same(found, expected) for found in ranks.run(send_tensor, ranks.size, dtype, shape, root))


def swap(rendezvous, rank, size, dtype, traffic, strided):
    x = block(rank, sum(traffic[rank]), 3, 2, dtype=dtype)
    if strided:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return world(rendezvous, rank, size).all_to_all(x, traffic[rank], [traffic[source][rank] for source in range(size)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", TRAFFIC)
def test_all_to_all(ranks: Ranks, dtype: torch.dtype, case: str):
    traffic = [row[: ranks.size] for row in TRAFFIC[case][: ranks.size]]
    sent = [block(rank, sum(row), 3, 2, dtype=dtype).split(row) for rank, row in enumerate(traffic)]
    for strided in (False, True):
        for rank, found in enumerate(ranks.run(swap, ranks.size, dtype, traffic, strided)):
            assert same(found, torch.cat([parts[rank] for parts in sent]))


def gather_rows(rendezvous, rank, size, dtype, lens):
    return world(rendezvous, rank, size).all_gather_rows(block(rank, lens[rank], 4, dtype=dtype), lens)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LENS)
def test_all_gather_rows(ranks: Ranks, dtype: torch.dtype, case: str):
    lens = LENS[case][: ranks.size]
    expected = torch.cat([block(rank, num, 4, dtype=dtype) for rank, num in enumerate(lens)])
    assert all(same(found, expected) for found in ranks.run(gather_rows, ranks.size, dtype, lens))


def reduce_rows(rendezvous, rank, size, dtype, lens):
    return world(rendezvous, rank, size).reduce_scatter_rows(block(rank, sum(lens), 5, dtype=dtype), lens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LENS)
def test_reduce_scatter_rows_adds_in_rank_order(ranks: Ranks, dtype: torch.dtype, case: str):
    lens = LENS[case][: ranks.size]
    total = block(0, sum(lens), 5, dtype=dtype).float()
    for rank in range(1, ranks.size):
        total = total + block(rank, sum(lens), 5, dtype=dtype).float()
    found = ranks.run(reduce_rows, ranks.size, dtype, lens)
    assert all(same(mine, part) for mine, part in zip(found, total.to(dtype).split(lens), strict=True))


def gather_columns(rendezvous, rank, size, num_rows, widths):
    return world(rendezvous, rank, size).gather_columns(block(rank, num_rows, widths[rank]), widths)


@pytest.mark.parametrize("num_rows", [0, 1, 6])
@pytest.mark.parametrize("widths", [[4, 4, 4], [5, 4, 4], [0, 3, 1]], ids=str)
def test_gather_columns(ranks: Ranks, num_rows: int, widths: list[int]):
    widths = widths[: ranks.size]
    first, *others = ranks.run(gather_columns, ranks.size, num_rows, widths)
    assert others == [None] * (ranks.size - 1)
    assert same(first, torch.cat([block(rank, num_rows, width) for rank, width in enumerate(widths)], dim=1))


def pass_barrier(rendezvous, rank, size, folder):
    group = world(rendezvous, rank, size)
    time.sleep(0.1 * rank)  # the slowest comes last; the others must wait for its mark
    (folder / f"{rank}").touch()
    group.barrier()
    return len(list(folder.iterdir()))


def test_barrier(ranks: Ranks, tmp_path: Path):
    assert ranks.run(pass_barrier, ranks.size, tmp_path) == [ranks.size] * ranks.size


def open_all(rendezvous, rank, dp, tp):
    groups = open_groups(ParallelConfig(dp=dp, tp=tp), rank, rendezvous)
    sums = [group.all_gather_ints([rank]) for group in (groups.world, groups.tp, groups.ep)]
    return groups.is_leader, [[value for (value,) in found] for found in sums]


def test_groups_of_a_topology(ranks_of: Callable[[int], Ranks]):
    found = ranks_of(4).run(open_all, 2, 2)
    everyone = [0, 1, 2, 3]
    assert found == [
        (True, [everyone, [0, 1], everyone]),
        (False, [everyone, [0, 1], everyone]),
        (True, [everyone, [2, 3], everyone]),
        (False, [everyone, [2, 3], everyone]),
    ]


def test_a_group_of_one_gives_its_arguments_back():
    group = open_groups(ParallelConfig(), 0).tp
    x = torch.randn(3, 2)
    assert group.all_gather_rows(x, [3]) is group.reduce_scatter_rows(x, [3]) is group.gather_columns(x, [2]) is x
    assert group.all_to_all(x, [3], [3]) is group.broadcast(x) is x
    assert group.all_gather_ints([4, 5]) == [[4, 5]] and group.broadcast_bytes(b"a") == b"a"
    group.barrier()


# -- peers that are gone or late --

# Collectives in which rank 0 needs something from every other rank.
NEEDY: dict[str, Callable[[Group], object]] = {
    "all_gather_ints": lambda group: group.all_gather_ints([1]),
    "all_to_all": lambda group: group.all_to_all(torch.ones(2 * group.size, 4), [2] * group.size, [2] * group.size),
    "all_gather_rows": lambda group: group.all_gather_rows(torch.ones(3, 4), [3] * group.size),
    "reduce_scatter_rows": lambda group: group.reduce_scatter_rows(torch.ones(3 * group.size, 4), [3] * group.size),
    "gather_columns": lambda group: group.gather_columns(torch.ones(3, 2), [2] * group.size),
    "broadcast": lambda group: group.broadcast(torch.ones(3), root=group.size - 1),
    "broadcast_bytes": lambda group: group.broadcast_bytes(None, root=group.size - 1),
    "barrier": lambda group: group.barrier(),
}
TIMEOUT_S = 0.5


def without_last(rendezvous, rank, size, how):
    """Every rank but the last tries each collective, on a group of its own since a broken one stays broken; seconds until PeerLost."""
    groups = {name: Group(name, list(range(size)), rank, rendezvous) for name in NEEDY}
    for group in groups.values():
        group.barrier()
        group.set_timeout(TIMEOUT_S)
    if rank == size - 1:
        if how == "dead":
            os._exit(9)
        time.sleep(TIMEOUT_S * (len(NEEDY) + 1))  # late for all of them
        return {}
    seconds = {}
    for name, collective in NEEDY.items():
        if name == "gather_columns" and rank > 0:
            continue  # it only sends
        started = time.monotonic()
        try:
            collective(groups[name])
        except PeerLost as error:
            assert repr(name) in str(error)
            seconds[name] = time.monotonic() - started
    return seconds


@pytest.mark.parametrize(("how", "size"), [pytest.param("dead", 2, marks=pytest.mark.long), ("dead", 3), ("late", 3)])
def test_a_peer_that_is_dead_or_late_is_lost_within_the_timeout(ranks_of: Callable[[int], Ranks], tmp_path: Path, how: str, size: int):
    with contextlib.ExitStack() as stack:
        ranks = ranks_of(size) if how == "late" else stack.enter_context(Ranks(size, tmp_path))
        *others, last = ranks.outcomes(without_last, size, how)
    assert isinstance(last, Died) if how == "dead" else last == {}
    for rank, seconds in enumerate(others):
        assert set(seconds) == set(NEEDY) - ({"gather_columns"} if rank else set()), f"rank {rank}"
        slow = {name: s for name, s in seconds.items() if s > TIMEOUT_S + 1.5}
        assert not slow, f"rank {rank}: {slow}"
        if how == "late":
            assert seconds["all_gather_ints"] > 0.8 * TIMEOUT_S, "it did not wait"


def meet_late(rendezvous, rank):
    group = Group("patient", [0, 1], rank, rendezvous)
    group.barrier()
    group.set_timeout(TIMEOUT_S)
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
        return 0.0
    started = time.monotonic()
    with pytest.raises(PeerLost):
        group.barrier()
    return time.monotonic() - started


def test_the_timeout_can_be_shortened_once_all_have_come(ranks_of: Callable[[int], Ranks]):
    seconds, _ = ranks_of(2).run(meet_late)
    assert 0.8 * TIMEOUT_S < seconds < TIMEOUT_S + 1.5


def test_a_peer_that_never_comes(tmp_path: Path):
    started = time.monotonic()
    with pytest.raises(PeerLost, match="'tp0' of 2 ranks did not come together"):
        Group("tp0", [4, 5], 4, Rendezvous(dist.FileStore(str(tmp_path / "rendezvous"), 2), timeout_s=1.0))
    assert time.monotonic() - started < 5.0


def go_on_without_first(rendezvous, rank):
    groups = open_groups(ParallelConfig(dp=2, tp=2), rank, rendezvous)
    before = groups.world
    groups.ep.barrier()
    if rank == 0:
        os._exit(0)
    with pytest.raises(PeerLost):
        groups.world.all_gather_ints([rank])
    groups.close()
    if rank == 1:
        return None
    again = replace(rendezvous, store=dist.PrefixStore("again", rendezvous.store))
    groups.reopen(ParallelConfig(dp=1, tp=2), rank - 2, again)
    assert groups.world is before
    return groups.world.all_gather_ints([rank]), groups.tp.all_gather_ints([rank]), (groups.dp_rank, groups.tp.rank)


def test_survivors_open_their_groups_anew(tmp_path: Path):
    with Ranks(4, tmp_path) as ranks:
        found = ranks.outcomes(go_on_without_first)
    assert isinstance(found[0], Died)
    assert found[2:] == [([[2], [3]], [[2], [3]], (0, 0)), ([[2], [3]], [[2], [3]], (0, 1))]
