"""Votes, parking and waking. Ranks are threads here and their collectives a barrier; the wake-ups travel over real sockets.

Real groups, and peers that die in a vote, are in tests/hw/test_groups.py and tests/deepserve/test_rank_death.py.
"""

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any

import pytest
import zmq

from deepserve.engine.lockstep import Ballot, Lockstep, Wait, expert_step
from hw.api import ExpertMode, ExpertStep
from hw.groups import PeerLost
from hw.topology import ParallelConfig

WAIT_S = 20.0
CAP = 8


class Board:
    """Where the collectives of all ranks meet."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.posted: list = [None] * size


class FakeWorld:
    """`Group` over threads."""

    def __init__(self, board: Board, rank: int):
        self.board, self.rank, self.size = board, rank, len(board.posted)

    def all_gather_ints(self, values: list[int]) -> list[list[int]]:
        return self._exchange(values)

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        return self._exchange(data)[root]

    def _exchange(self, mine):
        self.board.posted[self.rank] = mine
        try:
            self.board.barrier.wait()
            found = list(self.board.posted)
            self.board.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("a thread is gone") from None
        return found


@dataclass
class FakeGroups:
    """As much of `Groups` as votes need."""

    parallel: ParallelConfig
    rank: int
    world: FakeWorld


@dataclass
class Rank:
    """One rank: its lockstep and a socket for what a frontend would send."""

    lockstep: Lockstep
    inbox: zmq.Socket
    frontend: zmq.Socket
    poller: zmq.Poller = field(default_factory=zmq.Poller)

    def __post_init__(self):
        self.poller.register(self.inbox, zmq.POLLIN)

    def park(self, *args: Any) -> None:
        self.lockstep.park(self.poller, *args)

    def take(self) -> int:
        """Read all that the frontend sent; how much work it was."""
        num = 0
        while self.inbox.poll(0):
            num += self.inbox.recv() == b"work"
        return num

    def wait_for_note(self) -> None:
        """Until a wake-up lies in the socket of a rank that is not parked."""
        assert self.lockstep.wakeups.poll(WAIT_S * 1000), "no note came"


class Team:
    """`dp * tp` ranks in threads; a context manager."""

    def __init__(self, dp: int, tp: int = 1):
        self.size = dp * tp
        self.board = Board(self.size)
        self._context = zmq.Context()
        self._pool = ThreadPoolExecutor(self.size)
        parallel = ParallelConfig(dp=dp, tp=tp)
        groups = [FakeGroups(parallel, rank, FakeWorld(self.board, rank)) for rank in range(self.size)]
        locksteps = self.each(lambda rank: Lockstep(groups[rank], self._context, CAP))
        self.ranks = []
        for rank, lockstep in enumerate(locksteps):
            inbox, frontend = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
            inbox.bind(f"inproc://rank{rank}")
            frontend.connect(f"inproc://rank{rank}")
            self.ranks.append(Rank(lockstep, inbox, frontend))

    def start(self, job: Callable[[int], object]) -> list[Future]:
        """Run `job(rank)` on every rank at once."""
        return [self._pool.submit(job, rank) for rank in range(self.size)]

    def each(self, job: Callable[[int], object]) -> list:
        return [future.result(WAIT_S) for future in self.start(job)]

    def vote(self, *ballots: Ballot) -> list:
        return self.each(lambda rank: self.ranks[rank].lockstep.vote(ballots[rank]))

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)  # ends what still polls
        self.board.barrier.abort()
        self._pool.shutdown()


@pytest.fixture
def team():
    with Team(dp=3) as team:
        yield team


# -- votes --


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        ([1], ExpertStep(ExpertMode.LOW_LATENCY, 1)),
        ([0, CAP], ExpertStep(ExpertMode.LOW_LATENCY, CAP)),
        ([0, CAP + 1], ExpertStep(ExpertMode.THROUGHPUT, CAP + 1)),
        ([CAP + 1, 3, 0], ExpertStep(ExpertMode.THROUGHPUT, CAP + 1)),
    ],
)
def test_low_latency_iff_every_rank_fits_the_cap(num_tokens: list[int], expected: ExpertStep):
    assert expert_step(num_tokens, CAP) == expected
    # Where some rank may replay a captured step, its dispatch has one size.
    captured = expert_step(num_tokens, CAP, captured=True)
    assert captured == (ExpertStep(ExpertMode.LOW_LATENCY, CAP) if expected.mode is ExpertMode.LOW_LATENCY else expected)


@pytest.mark.parametrize(
    ("overlap", "num_tokens", "overlapped"),
    [
        ({ExpertMode.THROUGHPUT: CAP + 5}, [3, CAP + 4], False),
        ({ExpertMode.THROUGHPUT: CAP + 5}, [3, CAP + 5], True),
        ({ExpertMode.THROUGHPUT: 1}, [CAP, 1], False),
        ({ExpertMode.LOW_LATENCY: 4}, [0, 4], True),
        ({ExpertMode.LOW_LATENCY: 4}, [3, 3], False),
        ({ExpertMode.LOW_LATENCY: 4}, [CAP + 1, 3], False),
        (None, [CAP + 1, CAP], False),
    ],
)
def test_steps_overlap_from_a_number_of_tokens_of_one_rank(overlap, num_tokens: list[int], overlapped: bool):
    assert expert_step(num_tokens, CAP, captured=True, overlap=overlap).overlapped == overlapped


@pytest.mark.parametrize(("num_tokens", "idle"), [((0, 0, 0), True), ((0, 5, 0), False), ((9, 1, 3), False)])
def test_all_ranks_learn_the_same(team: Team, num_tokens: tuple[int, ...], idle: bool):
    first, *others = team.vote(*(Ballot(num, num > 0) for num in num_tokens))
    assert first.num_tokens == num_tokens
    assert first.idle == idle and not first.end
    assert first.step == expert_step(list(num_tokens), CAP)
    assert others == [first, first]
    assert [rank.lockstep.num_votes for rank in team.ranks] == [1, 1, 1]


def test_a_sequence_that_cannot_run_yet_waits_for_others(team: Team):
    assert not team.vote(Ballot(0, has_work=True), Ballot(4, has_work=True), Ballot())[0].idle


def test_work_that_nobody_takes_on_is_a_mistake(team: Team):
    for future in team.start(lambda rank: team.ranks[rank].lockstep.vote(Ballot(0, has_work=rank == 1))):
        with pytest.raises(AssertionError, match="no step takes on"):
            future.result(WAIT_S)


def test_tp_ranks_dispatch_a_slice_each_and_followers_have_no_say():
    with Team(dp=2, tp=2) as team:
        quiet = Ballot()
        outcome, *_ = team.vote(Ballot(2 * CAP - 1, True), quiet, Ballot(3, True), quiet)
        assert outcome.num_tokens == (2 * CAP - 1, 3)
        assert outcome.step == ExpertStep(ExpertMode.LOW_LATENCY, CAP)
        outcome, *_ = team.vote(Ballot(2 * CAP + 1, True), quiet, Ballot(), quiet)
        assert outcome.step == ExpertStep(ExpertMode.THROUGHPUT, CAP + 1)
        # Followers never say that they have drained; the leaders decide.
        assert all(o.end for o in team.vote(Ballot(drained=True), quiet, Ballot(drained=True), quiet))
        assert not any(o.end for o in team.vote(Ballot(drained=True), quiet, quiet, quiet))


def test_one_stop_ends_all_and_draining_waits_for_the_last(team: Team):
    working, idle, drained = Ballot(3, True), Ballot(), Ballot(drained=True)
    assert all(o.end for o in team.vote(working, idle, Ballot(2, True, stop=True)))
    assert not any(o.end for o in team.vote(drained, working, drained))
    assert not any(o.end for o in team.vote(drained, idle, drained))
    assert all(o.end for o in team.vote(drained, drained, drained))


def test_a_lost_peer_fails_the_vote(team: Team):
    team.board.barrier.abort()
    with pytest.raises(PeerLost):
        team.ranks[0].lockstep.vote(Ballot())


def test_one_rank_talks_to_nobody():
    with Team(dp=1) as alone:
        assert alone.vote(Ballot(5, True))[0].num_tokens == (5,)
        parked = alone.start(lambda rank: alone.ranks[rank].park())
        alone.ranks[0].frontend.send(b"work")
        parked[0].result(WAIT_S)


# -- parking and waking --


@pytest.mark.parametrize("woken", range(3))
def test_a_message_to_one_rank_wakes_all(team: Team, woken: int):
    parked = team.start(lambda rank: team.ranks[rank].park())
    assert not wait_for(parked, 0.1).done, "a rank does not stay parked"
    team.ranks[woken].frontend.send(b"work")
    for future in parked:
        future.result(WAIT_S)
    assert [rank.take() for rank in team.ranks] == [int(rank == woken) for rank in range(3)]


def test_a_look_that_finds_something_wakes_all(team: Team, monkeypatch: pytest.MonkeyPatch):
    for limit in ("PARK_S", "WHILE_S"):
        monkeypatch.setattr(f"deepserve.engine.lockstep.{limit}", 2 * WAIT_S)  # so that no time wakes them
    found = threading.Event()
    looks = [lambda: False, found.is_set, lambda: False]
    parked = team.start(lambda rank: team.ranks[rank].park(Wait.LOOK, looks[rank]))
    assert not wait_for(parked, 0.1).done, "a rank does not stay parked"
    found.set()
    for future in parked:
        future.result(WAIT_S)


def test_a_message_that_came_before_parking_is_not_slept_over(team: Team):
    team.ranks[1].frontend.send(b"work")
    assert team.ranks[1].inbox.poll(WAIT_S * 1000)
    team.each(lambda rank: team.ranks[rank].park())


def test_a_note_that_came_before_parking_is_not_slept_over(team: Team):
    """A rank may be woken before it has come to park after the same vote."""
    fast, *slow = team.ranks
    fast.frontend.send(b"work")
    fast.park()
    for rank in slow:
        rank.wait_for_note()
    team.each(lambda rank: rank == 0 or team.ranks[rank].park())


def test_late_notes_do_not_end_the_next_park(team: Team):
    """Ranks that wake at the same moment all tell each other; the notes lie there when they park again."""
    for _ in range(3):
        for rank in team.ranks:
            rank.frontend.send(b"work")
        team.each(lambda rank: team.ranks[rank].park())
        for rank in team.ranks:
            assert rank.inbox.poll(WAIT_S * 1000) and rank.take() == 1
            rank.lockstep._wake_peers()
    for rank in team.ranks:
        rank.wait_for_note()
    sent = threading.Event()

    def park(rank: int) -> bool:
        team.ranks[rank].park()
        return sent.is_set()

    parked = team.start(park)
    assert not wait_for(parked, 0.2).done, "a late note of an earlier park woke a rank"
    sent.set()
    team.ranks[2].frontend.send(b"work")
    assert all(future.result(WAIT_S) for future in parked)


@pytest.mark.parametrize("note", [b"", b"hello", bytes(24), bytes(1 << 16)], ids=len)
def test_a_strangers_note_wakes_nobody(team: Team, note: bytes):
    port = team.ranks[1].lockstep.wakeups.getsockopt(zmq.LAST_ENDPOINT)
    parked = team.start(lambda rank: team.ranks[rank].park())
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(port.rstrip(b"\0").decode())
        for _ in range(5):
            stranger.send(note)
        stranger.send_multipart([note, note])
    assert not wait_for(parked, 0.2).done, "a stranger woke a rank"
    team.ranks[0].frontend.send(b"work")
    for future in parked:
        future.result(WAIT_S)


def test_a_note_with_the_right_number_needs_the_key(team: Team):
    """A single rank that leaves the park would vote alone until the others are taken for lost."""
    other = Team(dp=3)
    with other:
        port = team.ranks[1].lockstep.wakeups.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        parked = team.start(lambda rank: team.ranks[rank].park())
        foreign = other.ranks[0].lockstep._peers[0]
        foreign.disconnect(foreign.getsockopt(zmq.LAST_ENDPOINT))
        foreign.connect(port)
        others = other.start(lambda rank: rank == 0 and other.ranks[rank].park())
        other.ranks[0].frontend.send(b"work")
        others[0].result(WAIT_S)
        assert not wait_for(parked, 0.2).done
        team.ranks[0].frontend.send(b"work")
        for future in parked:
            future.result(WAIT_S)


@pytest.mark.parametrize("size", [2, 3])
def test_random_work_is_all_done_and_nobody_stalls(size: int, seed: int):
    """The engine loop in small: take messages, vote, work or park. Frontends send at random moments, often to several ranks at once."""
    rng = random.Random(seed)
    num_rounds = 300
    done = [0] * size
    sent = [0] * size
    last = threading.Event()

    with Team(dp=size) as team:

        def loop(rank: int) -> int:
            pending = num_parks = 0
            me = team.ranks[rank]
            while True:
                ended = last.is_set()  # before looking: what was sent before it is seen
                pending += me.take()
                outcome = me.lockstep.vote(Ballot(min(pending, 2), pending > 0, drained=ended and not pending))
                if outcome.end:
                    return num_parks
                if outcome.idle:
                    num_parks += 1
                    me.park()
                    continue
                taken = min(pending, 2)
                pending -= taken
                done[rank] += taken

        running = team.start(loop)
        for _ in range(num_rounds):
            for rank in rng.sample(range(size), rng.randint(1, size)):
                team.ranks[rank].frontend.send(b"work")
                sent[rank] += 1
            wait_for(running, rng.choice([0.0, 0.0, 0.0005, 0.003]))
        last.set()
        for rank in range(size):
            team.ranks[rank].frontend.send(b"look")  # whoever is parked does so again
        parks = [future.result(WAIT_S) for future in running]
    assert done == sent
    assert len(set(parks)) == 1, f"ranks parked {parks} times"
    assert parks[0] > 3, "they hardly ever parked; the test shows nothing"
