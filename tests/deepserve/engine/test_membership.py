"""Who is in after a death, a departure, an arrival: agreed by members that each know only their own part. Threads stand for ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import deepserve.engine.membership as membership
from deepserve.engine.membership import Excluded, Membership
from deepserve.spawn import LIVES_APART
from hw.groups import PeerLost
from hw.topology import ParallelConfig

WAIT_S = 30.0


class Team:
    """Members over one store; `lost` is what the others hear of deaths."""

    def __init__(self, parallel: ParallelConfig):
        self.store, self.parallel, self.lost = dist.HashStore(), parallel, set()
        self.of = {rank: self.member(rank) for rank in range(parallel.num_ranks)}

    def member(self, rank: int, life: int = 0) -> Membership:
        return Membership(self.store, self.parallel, rank, life, self.lost.copy)

    def each(self, work: dict[int, Callable[[], None]]) -> dict[int, Exception | None]:
        """Runs each in a thread of its own; what it raised."""
        with ThreadPoolExecutor(len(work)) as pool:
            jobs = {key: pool.submit(call) for key, call in work.items()}
            return {key: job.exception(WAIT_S) for key, job in jobs.items()}

    def meet(self, *ranks: int, **options) -> dict[int, Exception | None]:
        return self.each({rank: lambda rank=rank: self.of[rank].meet(**options) for rank in ranks})


def test_survivors_go_on_without_the_dead_one_whoever_it_is():
    for dead in range(4):
        team = Team(ParallelConfig(dp=4, nodes=2))
        team.lost.add(dead)
        alive = [rank for rank in range(4) if rank != dead]
        assert set(team.meet(*alive).values()) == {None}
        assert [team.of[rank].members for rank in alive] == [alive] * 3
        assert [team.of[rank].rank for rank in alive] == [0, 1, 2]
        assert {team.of[rank].parallel for rank in alive} == {ParallelConfig(dp=3)}, "two nodes of different size count as one"


def test_one_death_after_the_other_and_a_successor_joins():
    team = Team(ParallelConfig(dp=3))
    for dead, alive in ((0, (1, 2)), (2, (1,))):
        team.lost.add(dead)
        assert set(team.meet(*alive).values()) == {None}
    fresh = team.member(0, life=1)
    assert team.of[1].applicants() == []
    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(fresh.apply)
        while not team.of[1].applicants():
            pass
        team.of[1].meet(planned=True)
        applied.result(WAIT_S)
    assert fresh.members == team.of[1].members == [LIVES_APART, 1], "in the order of ranks"
    assert (fresh.epoch, fresh.rank, fresh.parallel) == (3, 0, ParallelConfig(dp=2))
    assert team.of[1].applicants() == [] and team.of[1].lost == [], "the former life's death is not the new one's"


def test_a_dead_tp_rank_takes_its_replica_along():
    team = Team(ParallelConfig(dp=2, tp=2))
    team.lost.add(3)
    raised = team.meet(0, 1, 2)
    assert raised[0] is raised[1] is None and isinstance(raised[2], Excluded)
    assert team.of[0].members == [0, 1]


def test_half_a_replica_is_not_let_in():
    team = Team(ParallelConfig(dp=2, tp=2))
    team.lost |= {2, 3}
    team.meet(0, 1)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(team.member(2, 1).apply)]
        while not team.store.check(["application1"]):
            pass
        assert team.of[0].applicants() == []
        jobs.append(pool.submit(team.member(3, 1).apply))
        while team.of[0].applicants() != [LIVES_APART + 2, LIVES_APART + 3]:
            pass
        team.meet(0, 1, planned=True)
        for job in jobs:
            job.result(WAIT_S)
    assert team.of[0].members == [0, 1, LIVES_APART + 2, LIVES_APART + 3]


def test_one_more_than_there_were():
    team = Team(ParallelConfig(dp=2))
    fresh = team.member(2, life=1)
    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(fresh.apply)
        while not team.of[0].applicants():
            pass
        assert set(team.meet(0, 1, planned=True).values()) == {None}
        applied.result(WAIT_S)
    assert fresh.members == team.of[1].members == [0, 1, fresh.me]
    assert (fresh.rank, fresh.parallel) == (2, ParallelConfig(dp=3))


def test_leaving():
    team = Team(ParallelConfig(dp=3))
    assert set(team.meet(0, 2, leaving=[1], planned=True).values()) == {None}
    assert team.of[2].members == [0, 2]


def test_who_does_not_appear_is_out_for_good(monkeypatch: pytest.MonkeyPatch):
    """It was stopped, not dead; when it goes on it must not believe to be in."""
    monkeypatch.setattr(membership, "GRACE_S", 0.1)
    team = Team(ParallelConfig(dp=3))
    assert set(team.meet(0, 1).values()) == {None}
    assert isinstance(team.meet(2)[2], Excluded)
    assert team.of[0].members == [0, 1]


def test_a_death_while_they_gather_is_for_the_next_epoch():
    team = Team(ParallelConfig(dp=3))
    team.lost.add(2)
    # Rank 1 dies after it has said that it is here for epoch 1; a newcomer that was let in dies before it comes.
    team.store.set("application1", str(LIVES_APART + 2))
    team.store.add("applications", 1)
    assert isinstance(team.each({0: lambda: _meet_and_lose(team, LIVES_APART + 2)})[0], PeerLost)
    assert team.meet(0)[0] is None
    assert team.of[0].members == [0]


def _meet_and_lose(team: Team, newcomer: int) -> None:
    team.store.set("epoch1/here/1", "")

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(team.of[0].meet, planned=True)
        while not team.store.check([f"admission/{newcomer}"]):
            pass
        team.lost |= {1, newcomer}
        job.result(WAIT_S)
