"""Ranks of one instance step together: a vote before each step, parking when all are idle, waking each other.

    every rank:   receive -> plan -> vote -> run (with zero tokens where there was no plan) -> apply -> ...
                                      |
                                      '-- nobody has work: park until a request comes in or another rank wakes us

A vote is one small collective on the host. It tells every rank how many tokens each brings and what else must be decided alike; its
result fixes the expert-communication mode of the step. A dead peer fails the vote, one that stands still fails it after the step
timeout; nobody waits for ever. Parked ranks vote every `PARK_S` seconds, so that they notice as well.
"""

import ipaddress
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import zmq

from deepserve.control import secure_client, secure_server
from hw.api import ExpertMode, ExpertStep
from hw.groups import Groups

PARK_S = 5.0
WHILE_S = 1.0
LOOK_MS = 2  # between looks at a transfer: little beside what it takes, and little work where the rank has nothing else to do


class Wait(IntEnum):
    """What a rank waits for where nobody has work. The most urgent one counts for all."""

    MESSAGE = 0
    WHILE = 1  # or until `WHILE_S` have passed, for it has to ask again for something
    LOOK = 2  # the same, and something may come without a message


@dataclass(frozen=True)
class Ballot:
    """What one rank says before a step. Sent as integers, in this order."""

    num_tokens: int = 0  # of its DP replica's plan; 0: no plan
    has_work: bool = False  # it has sequences, even if none can run now
    has_launched: bool = False  # it has yet to collect its last step, and may have more to do then
    stop: bool = False  # told to end now
    drained: bool = False  # told to drain, and nothing is left here
    num_drafts: int = 0  # that its plan makes
    wait: Wait = Wait.MESSAGE
    has_news: bool = False  # for its TP group, which hears it behind the vote
    leaves: bool = False  # its DP replica is to leave the instance, and nothing is left there
    regroup: bool = False  # others wait to be let in

    def ints(self) -> list[int]:
        flags = (self.has_work, self.has_launched, self.stop, self.drained)
        return [self.num_tokens, *map(int, flags), self.num_drafts, int(self.wait), *map(int, (self.has_news, self.leaves, self.regroup))]


@dataclass(frozen=True)
class Outcome:
    """What all ranks know after a vote, equal everywhere."""

    num_tokens: tuple[int, ...]  # of each DP replica
    step: ExpertStep  # meaningful if any token runs
    collect: bool  # nobody has a plan, but somebody has a step to collect first
    end: bool  # somebody was told to stop, or all have drained
    num_drafts: int = 0  # most that a rank makes in this step: all see it through, since experts of the MTP module are spread over them
    wait: Wait = Wait.MESSAGE
    news: tuple[int, ...] = ()  # ranks that have some
    leaving: tuple[int, ...] = ()  # DP replicas that leave now
    regroup: bool = False  # the ranks are others from now on; no step comes first

    @property
    def idle(self) -> bool:
        return not any(self.num_tokens) and not self.collect


def expert_step(num_tokens: list[int], cap: int, *, captured: bool = False, overlap: Mapping[ExpertMode, int] | None = None) -> ExpertStep:
    """Low latency iff the tokens that each rank dispatches fit its cap.

    captured: some rank may replay its step. The dispatch inside has the size that was captured, so all have it.
    overlap: tokens of a rank from which a step is overlapped, by mode; a mode that is left out never is.
    """
    most = max(num_tokens)
    mode = ExpertMode.THROUGHPUT if most > cap else ExpertMode.LOW_LATENCY
    size = cap if captured and mode is ExpertMode.LOW_LATENCY else most
    return ExpertStep(mode, size, overlapped=most >= (overlap or {}).get(mode, math.inf))


class Lockstep:
    """One rank's part. With a single rank a vote is a function call and parking is a poll."""

    def __init__(
        self,
        groups: Groups,
        context: zmq.Context,
        max_dispatch_tokens_per_rank: int,
        *,
        captured: bool = False,
        overlap: Mapping[ExpertMode, int] | None = None,
        address: str = "127.0.0.1",
        secret: str = "",
    ):
        """Collective over all ranks of the instance: they exchange where to be woken. For captured and overlap see `expert_step`.

        address: this rank's IPv4 address, as its peers reach it. secret: seals wake-ups that leave the machine.
        """
        self.groups = groups
        self._cap, self._captured, self._overlap = max_dispatch_tokens_per_rank, captured, overlap
        self._num_parks = 0
        self.wakeups = context.socket(zmq.PULL)
        self.wakeups.setsockopt(zmq.LINGER, 0)
        secure_server(self.wakeups, secret)
        port = self.wakeups.bind_to_random_port(f"tcp://{address}")
        # Whoever knows the key is a peer. A stranger on the port must not wake one rank alone: its vote would wait for the others.
        self._key = groups.world.broadcast_bytes(secrets.token_bytes(16) if groups.world.rank == 0 else None)
        self._peers = []
        for rank, (host, peer_port) in enumerate(groups.world.all_gather_ints([int(ipaddress.IPv4Address(address)), port])):
            if rank != groups.rank:
                peer = context.socket(zmq.PUSH)
                peer.setsockopt(zmq.LINGER, 0)
                secure_client(peer, secret)
                peer.connect(f"tcp://{ipaddress.IPv4Address(host)}:{peer_port}")
                self._peers.append(peer)
        self.num_votes = 0

    def vote(self, ballot: Ballot) -> Outcome:
        """Collective. Raises PeerLost."""
        ballots = self.groups.world.all_gather_ints(ballot.ints())
        self.num_votes += 1
        tp = self.groups.parallel.tp
        leaders = ballots[::tp]  # followers have no plans of their own
        num_tokens = tuple(row[0] for row in leaders)
        collect = not any(num_tokens) and any(row[2] for row in leaders)
        wait = Wait(max(row[6] for row in ballots))
        assert any(num_tokens) or collect or wait or not any(row[1] for row in leaders), "there is work that no step takes on"
        end = any(row[3] for row in leaders) or all(row[4] for row in leaders)
        brought = [-(-tokens // tp) for tokens in num_tokens]
        step = expert_step(brought, self._cap, captured=self._captured, overlap=self._overlap)
        news = tuple(rank for rank, row in enumerate(ballots) if row[7])
        leaving = tuple(dp for dp, row in enumerate(leaders) if row[8])
        regroup = bool(leaving) or any(row[9] for row in leaders)
        return Outcome(num_tokens, step, collect, end, max(row[5] for row in leaders), wait, news, leaving, regroup)

    def park(self, poller: zmq.Poller, wait: Wait = Wait.MESSAGE, look: Callable[[], bool] | None = None) -> None:
        """Sleep until a message or a wake-up of this park comes in, or it is time to see whether the other ranks live, or what `wait` says.

        `poller` holds this rank's other sockets; a message there wakes the other ranks, and so do time and a `look` that finds something.
        """
        self._num_parks += 1
        limit_s = PARK_S if self._peers else math.inf
        deadline = time.monotonic() + (limit_s if wait is Wait.MESSAGE else min(limit_s, WHILE_S))
        poller.register(self.wakeups, zmq.POLLIN)
        while True:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            looks = look is not None and wait is Wait.LOOK
            sleep_ms = min(left_ms, LOOK_MS) if looks else left_ms
            ready = dict(poller.poll(None if math.isinf(sleep_ms) else math.ceil(sleep_ms)))
            if self.wakeups in ready and not self._take_wakeups():
                ready.pop(self.wakeups)  # a late one, of an earlier park
            if ready or time.monotonic() >= deadline or (looks and look()):
                break
        poller.unregister(self.wakeups)
        if self.wakeups not in ready:
            self._wake_peers()

    def _wake_peers(self) -> None:
        for peer in self._peers:
            peer.send(self._note())

    def _note(self) -> bytes:
        """What wakes from this park. All ranks count parks alike, since all park after the same vote."""
        return self._key + self._num_parks.to_bytes(8, "little")

    def _take_wakeups(self) -> bool:
        """Read all that is there; whether one of them means this park."""
        meant = False
        while True:
            try:
                note = self.wakeups.recv(zmq.NOBLOCK)
            except zmq.Again:
                return meant
            meant = meant or note == self._note()

    def close(self) -> None:
        for socket in (self.wakeups, *self._peers):
            socket.close()
