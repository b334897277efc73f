"""Whatever fails, and whenever: no page is lost, none is given away while something may be written to it, no token is wrong."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from deepserve.engine.engine import Engine
from deepserve.engine.pages import PageState
from deepserve.messages import Process
from deepserve.pd.fence import FINISH_S, _stat, may_write, this_process
from deepserve.pd.messages import Attempt, GiveUp, HandOff, Prefill, Progress, Reservation, Reserve, Settled
from tests.deepserve.engine.driving import Request, make_engine, minimal_folder, run_together
from tests.deepserve.pd.fake_transfer import FakeNetwork
from tests.deepserve.pd.pair import PREFILL, Pair

LEASE_S = 15.0
PROMPT = [3 + i % 50 for i in range(150)]


@pytest.fixture
def network(monkeypatch) -> FakeNetwork:
    network = FakeNetwork()
    monkeypatch.setattr("deepserve.pd.role.open_transfer", network.open)
    return network


def make(folder: Any, **args: Any) -> Engine:
    shared = {"model": str(folder), "load_format": "dummy", "batch_invariant": True, "max_model_len": 320, "cpu_kernels": "torch"}
    return make_engine(**{**shared, "num_pages": 12, "max_num_seqs": 6, "max_num_batched_tokens": 64, **args})


@pytest.fixture
def pair(tmp_path, network) -> Pair:
    folder = minimal_folder(tmp_path)
    return Pair(make(folder), make(folder), lease_s=LEASE_S, clock=network.clock)


def move_all(pair: Pair, network: FakeNetwork) -> None:
    for write in list(network.writes):
        network.move(write)


def drain(pair: Pair, network: FakeNetwork) -> None:
    """Let everything arrive that is under way, and time pass."""
    for _ in range(2000):
        move_all(pair, network)
        network.now_s += 0.5
        pair.turn()
        if not pair.busy and not network.writes:
            break
    assert [side.engine.pages.num_held for side in pair.sides.values()] == [0, 0]


# Where a hand-off of a prompt of three chunks can stand when something happens to it.
PHASES = {
    "asked": lambda pair, network: None,
    "reserved": lambda pair, network: pair.decode.turn(),
    "queued at prefill": lambda pair, network: (pair.decode.turn(), pair.deliver()),
    "half written": lambda pair, network: (pair.turn(), pair.turn(), pair.turn()),
    "written, not arrived": lambda pair, network: [pair.turn() for _ in range(6)],
    "running": lambda pair, network: [(pair.turn(), move_all(pair, network)) for _ in range(8)],
}


@pytest.mark.parametrize("end", ["abort", "give up", "frontend gone", "silence"])
@pytest.mark.parametrize("phase", PHASES)
def test_the_end_of_an_attempt_in_every_phase(pair, network, phase, end):
    attempt = pair.submit("r", PROMPT, max_tokens=40)
    PHASES[phase](pair, network)
    if end == "abort":
        pair.prefill.abort("r")
        pair.decode.abort("r")
    elif end == "give up":
        pair.give_up(attempt)
    elif end == "frontend gone":
        for side in pair.sides.values():
            side.hand_offs.forget("line")
    else:
        pair.loses = lambda message: True
        for _ in range(3):
            network.now_s += LEASE_S
            pair.turn()
        pair.loses = lambda message: False
    if end != "abort" and phase == "running":  # it needs nobody any more
        pair.until(lambda: pair.stories["r", 0].finish_reason == "length")
    under_way = [write for write in network.writes if not write.settled]
    expected = 3 if under_way and phase != "running" else 0
    for _ in range(4):  # a question, its way there, the answer's way back
        network.now_s += 1.1
        pair.turn()
    assert pair.decode.engine.pages.states()[PageState.QUARANTINED] == expected
    drain(pair, network)
    assert pair.decode.adopted == (["r"] if phase == "running" else [])


def test_a_lost_answer_is_asked_for_again(pair, network):
    attempt = pair.submit("r", PROMPT)
    PHASES["half written"](pair, network)
    pair.loses = lambda message: isinstance(message, Settled)
    pair.give_up(attempt)
    move_all(pair, network)
    for _ in range(5):
        network.now_s += 1.1
        pair.turn()
        assert pair.decode.engine.pages.states()[PageState.QUARANTINED] == 3
    pair.loses = lambda message: False
    drain(pair, network)


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def as_writer(process: subprocess.Popen) -> Process:
    return msgspec.structs.replace(this_process(), pid=process.pid, started=_stat(process.pid)[1])


def test_no_page_is_offered_that_a_step_in_flight_writes_to(tmp_path, network):
    """A remote writer is not in the order of the device's steps, so it waits for a step whose sequence is gone."""
    folder = minimal_folder(tmp_path)
    pair = Pair(make(folder), make(folder, async_scheduling=True), lease_s=LEASE_S, clock=network.clock)
    scheduler, rows = pair.decode.engine.scheduler, pair.decode.engine.runner.rows
    offered: list[bool] = []

    def look(message: Any) -> bool:
        if isinstance(message, Reservation):
            written = {page for step in scheduler._in_flight for row in step.plan.rows for page in rows.page_table[row].tolist()}
            offered.append(written.isdisjoint(message.pages))
        return False

    pair.loses = look
    for name in ("stays", "first", "second", "third"):
        pair.submit(name, PROMPT, max_tokens=100 if name == "stays" else 50)
        while name not in pair.decode.adopted:
            pair.turn()
            move_all(pair, network)
        pair.turn()
        assert scheduler._in_flight
        if name != "stays":
            pair.decode.abort(name)
    assert offered == [True] * 4
    pair.decode.abort("stays")
    drain(pair, network)


def stand_still(pair: Pair, network: FakeNetwork, num_turns: int = 4) -> dict[PageState, int]:
    """The prefill side does and hears nothing; pages of the decode side after a while."""
    pair.loses = lambda message: isinstance(message, Settled | Progress)
    network.now_s += LEASE_S
    for _ in range(num_turns):
        network.now_s += 1.1
        pair.turn()
    return pair.decode.engine.pages.states()


def assert_late_bytes_change(pair: Pair, network: FakeNetwork, changed: bool) -> None:
    caches = pair.decode.engine.runner.caches
    before = [cache.clone() for cache in caches]
    assert network.writes
    move_all(pair, network)
    assert any(not torch.equal(*both) for both in zip(before, caches, strict=True)) == changed


def test_a_writer_elsewhere_that_stands_still_is_shut_out(pair, network):
    """It goes on later, and its bytes change nothing any more."""
    pair.writers = [Process("another machine", 1, 1)]
    pair.submit("r", PROMPT)
    PHASES["half written"](pair, network)
    pages = stand_still(pair, network)
    assert (pages[PageState.QUARANTINED], pages[PageState.HELD]) == (0, 0)
    assert_late_bytes_change(pair, network, False)
    pair.loses = lambda message: False
    pair.submit("again", PROMPT)
    drain(pair, network)
    assert pair.decode.adopted == ["again"]


def test_a_writer_of_this_machine_must_be_gone(pair, network, child):
    """It copies by itself, so its late bytes arrive whatever this side does."""
    pair.writers, network.copies_by_itself = [as_writer(child)], True
    pair.submit("r", PROMPT)
    PHASES["half written"](pair, network)
    child.send_signal(signal.SIGSTOP)
    assert stand_still(pair, network)[PageState.QUARANTINED] == 3
    assert_late_bytes_change(pair, network, True)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked yet how it ended
    assert stand_still(pair, network)[PageState.QUARANTINED] == 0
    child.wait()
    assert not may_write(pair.writers[0])
    assert not may_write(msgspec.structs.replace(this_process(), started=1)), "another one had the number before"
    assert may_write(msgspec.structs.replace(this_process(), machine=f"{this_process().machine.split()[0]} pid:[1]", pid=1 << 30))


@pytest.mark.parametrize("slow", [False, True], ids=["in time", "too slow"])
def test_other_hand_offs_may_finish_while_a_writer_is_shut_out(pair, network, slow):
    pair.writers = [Process("another machine", 1, 1)]
    dead = pair.submit("dead", PROMPT)
    PHASES["half written"](pair, network)
    network.writes.clear()
    pair.writers = [Process("a third machine", 1, 1)]
    other = pair.submit("other", PROMPT)
    PHASES["half written"](pair, network)
    pair.loses = lambda message: isinstance(message, Settled) and message.attempt == dead
    pair.give_up(dead)
    for _ in range(3):
        network.now_s += 1.1
        pair.turn()
    assert pair.decode.engine.pages.states()[PageState.QUARANTINED] == 3, "it would cost the other one its pages"
    if slow:
        network.now_s += FINISH_S
    else:
        move_all(pair, network)
    for _ in range(8):
        pair.turn()
        if not slow:
            move_all(pair, network)
    assert pair.decode.adopted == ([] if slow else ["other"])
    assert (pair.given_up.get(other) == "the pages had to be made safe from another writer") == slow
    network.now_s += 1.1
    drain(pair, network)


def test_the_word_of_a_later_process_does_not_count(pair, network, tmp_path):
    pair.writers = [Process("another machine", 1, 1)]
    attempt = pair.submit("r", PROMPT)
    PHASES["half written"](pair, network)
    pair.give_up(attempt)
    pair.decode.hand_offs.on_message("line", PREFILL, Settled(attempt, [Process("another machine", 1, 2)]))
    assert pair.decode.engine.pages.states()[PageState.QUARANTINED] == 3
    pair.decode.hand_offs.on_message("line", PREFILL, Settled(attempt, pair.writers))
    assert pair.decode.engine.pages.states()[PageState.QUARANTINED] == 0


def test_a_broken_connection_and_a_missed_deadline_end_the_attempt_with_a_reason(pair, network):
    first = pair.submit("a", PROMPT)
    PHASES["half written"](pair, network)
    network.fail(network.writes[0])
    pair.turn()
    pair.turn()
    assert pair.given_up[first] == "the hand-off failed: a write to decode.0 has failed"
    drain(pair, network)
    second = pair.submit("b", PROMPT)
    PHASES["written, not arrived"](pair, network)
    network.now_s += LEASE_S / 2  # shows life meanwhile, so the lease holds
    pair.turn()
    network.now_s += LEASE_S / 2 + 1
    pair.turn()
    pair.turn()
    assert pair.given_up[second] == "the hand-off failed: a write to decode.0 has timed out"
    drain(pair, network)


def test_what_prefill_refuses(pair, network):
    pair.prefill.engine.pages.weight_version = 4
    attempt = pair.submit("r", PROMPT)
    drain(pair, network)
    assert pair.given_up == {attempt: "weights are of version 4 at prefill, 0 at decode"}


def random_prompt(rng: random.Random) -> list[int]:
    prompt = [3 + i % 50 for i in range(rng.choice([rng.randrange(1, 12), rng.randrange(1, 200)]))]
    prompt[rng.randrange(len(prompt))] = rng.randrange(64)
    return prompt


class Walk:
    """Random requests, and everything that can happen to them."""

    def __init__(self, pair: Pair, network: FakeNetwork, rng: random.Random):
        self.pair, self.network, self.rng = pair, network, rng
        self.attempts: dict[str, Attempt] = {}  # of requests that are to end well
        self.requests: dict[str, Request] = {}
        self.num_submitted = 0
        pair.loses = lambda message: rng.random() < 0.02

    def submit(self) -> None:
        request_id = f"r{self.num_submitted}"
        self.num_submitted += 1
        params = {
            "max_tokens": self.rng.choice([1, self.rng.randrange(1, 80)]),
            "n": self.rng.choice([1, 1, 1, 2]),
            "temperature": self.rng.choice([0.0, 1.0]),
            "stop_token_ids": self.rng.choice([[], [5, 20, 33]]),
            "seed": self.rng.randrange(100),
        }
        self.requests[request_id] = Request(random_prompt(self.rng), params)
        # Those elsewhere never get their word in: they are shut out again and again.
        self.pair.writers = self.rng.choice([self.pair.prefill.hand_offs.writers, [Process("another machine", 1, 1)]])
        self.attempts[request_id] = self.pair.submit(request_id, self.requests[request_id].prompt, **params)

    def retry(self) -> None:
        """What was given up before anything came of it."""
        for request_id, attempt in list(self.attempts.items()):
            if attempt in self.pair.given_up and request_id not in self.pair.decode.adopted:
                request = self.requests[request_id]
                self.attempts[request_id] = self.pair.submit(request_id, request.prompt, attempt.epoch + 1, **request.params)

    def disturb(self) -> None:
        verb, rng, network, pair = self.rng.random(), self.rng, self.network, self.pair
        if verb < 0.15:
            self.submit()
        elif verb < 0.4:
            if network.writes:
                (network.move if verb < 0.38 else network.fail)(rng.choice(network.writes))
        elif verb < 0.44 and self.attempts:
            self.drop(rng.choice(list(self.attempts)))
        elif verb < 0.48 and self.attempts:
            attempt = rng.choice(list(self.attempts.values()))
            if attempt.transfer not in pair.decode.adopted:
                pair.give_up(attempt)
        elif verb < 0.52:
            network.now_s += rng.random() * LEASE_S * 0.7
        elif verb < 0.55 and len(pair.decode.engine.scheduler.running) > 1:
            pair.decode.engine.scheduler._preempt(pair.decode.engine.scheduler.running[-1])
        network.now_s += 0.05

    def drop(self, request_id: str) -> None:
        """The client has gone."""
        del self.attempts[request_id]
        self.pair.prefill.abort(request_id)
        self.pair.decode.abort(request_id)

    def finish(self) -> None:
        """Nothing more goes wrong."""
        self.pair.loses = lambda message: False
        for _ in range(5000):
            self.retry()
            move_all(self.pair, self.network)
            self.network.now_s += 0.5
            self.pair.turn()
            if not self.pair.busy and not self.network.writes:
                lost = [a for a in self.attempts.values() if a.transfer not in self.pair.decode.adopted]
                if not lost:
                    return
                for attempt in lost:  # its `Reserve` or `Reservation` got lost; a frontend has a deadline of its own
                    self.pair.give_up(attempt)
        raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("args", [{}, {"async_scheduling": True}], ids=["synchronous", "asynchronous"])
def test_random_walk(tmp_path, network, seed, args):
    rng = random.Random(seed)
    folder = minimal_folder(tmp_path)
    pair = Pair(make(folder, **args), make(folder, **args), lease_s=LEASE_S, clock=network.clock)
    walk = Walk(pair, network, rng)
    for _ in range(600):
        walk.disturb()
        walk.retry()
        pair.turn()
    walk.finish()
    assert [side.engine.pages.num_held for side in pair.sides.values()] == [0, 0]
    kinds = {type(message) for message in pair.seen}
    assert kinds == {Reserve, Reservation, Prefill, Progress, HandOff, GiveUp, Settled}, kinds
    reference = make(folder, num_pages=60, max_num_seqs=16)
    assert len(walk.attempts) > 40
    requests = {request_id: walk.requests[request_id] for request_id in walk.attempts}
    expected = iter(run_together(reference, list(requests.values())))
    for request_id, request in requests.items():
        for index in range(request.params["n"]):
            found, story = pair.stories[request_id, index], next(expected)
            assert (found.tokens, found.finish_reason) == (story.tokens, story.finish_reason), request_id
