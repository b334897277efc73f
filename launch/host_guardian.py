"""Guardian of all ranks of an instance that outlives them (`on_rank_death = "replan"`): one torchrun worker holds them as its children.

So torchrun, which ends all its workers with the first, sees none of them die. A rank that dies is started again; the frontend hears at
once who is dead, and says how many DP replicas there are to be.
"""

import os
import signal
import sys
import time
from contextlib import suppress

import msgspec
import zmq

from deepserve.config import EngineArgs
from deepserve.control import Line, secure_server
from deepserve.messages import Died, FromEngine, Guardian, Register, Scale, ToEngine
from deepserve.spawn import LocalInstance, is_suspended
from launch.cluster import Membership

LOOK_MS = 100  # between looks at the processes
GRACE_S = 5.0  # for ranks to end when their lifelines are cut


class HostGuardian:
    """`guard` it in the main thread."""

    def __init__(self, args: EngineArgs, member: Membership):
        options = {"role": member.role, "secret": member.secret, "dead_link_s": member.lease_s}
        self._ranks, self._member = LocalInstance(args, instance=member.instance, options=options), member
        self._context = zmq.Context()
        # Ranks register here too: who serves must be known while no frontend is there.
        self._desk = self._context.socket(zmq.ROUTER)
        secure_server(self._desk, member.secret)
        self._desk.bind("tcp://127.0.0.1:*")
        self._line = Line(self._context, member.frontend, secret=member.secret, dead_link_s=member.lease_s)
        self._poller = zmq.Poller()
        for each in (self._desk, self._line.socket, self._line.monitor):
            self._poller.register(each, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._from_ranks, self._from_frontend = msgspec.msgpack.Decoder(FromEngine), msgspec.msgpack.Decoder(ToEngine)
        self._pids: dict[int, int] = {}  # of leaders of TP groups that serve, by DP rank
        self._suspended_s: dict[int, float] = {}  # since when each process is, by pid
        self._torchrun = os.getppid()
        self._num_signals = 0
        self._draining = False

    def guard(self) -> int:
        """Start the ranks, and see them through to the end of the instance; the exit code for torchrun.

        A first signal asks them to finish what they have. A second one ends them at once, and so does the end of torchrun.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._ranks.start(self._member.frontend, self._desk.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        try:
            while self._ranks.pids and os.getppid() == self._torchrun:
                self._poller.poll(LOOK_MS)
                self._hear_frontend()
                self._hear_ranks()
                self._end_suspended()
                if self._num_signals and not self._draining:
                    self._draining = True
                    self._ranks.drain(self._pids.values())
                if (code := self._look()) is not None:
                    return code
        finally:
            self._ranks.stop(GRACE_S if self._num_signals < 2 and os.getppid() == self._torchrun else 0.0)
            self._line.close(linger_ms=0)
            self._desk.close(0)
            self._context.term()
        return 0

    def _look(self) -> int | None:
        """See who has died; the exit code if that was the end of the instance."""
        death = self._ranks.poll(self._pids.values())
        if death is None:
            return None
        if not death.outlived:
            if death.code:
                print(f"deepserve: {death} and was not told to", file=sys.stderr, flush=True)
            return death.code
        self._pids = {dp: pid for dp, pid in self._pids.items() if pid not in death.outlived}
        self._tell(Died(list(death.outlived), str(death)))
        return None

    def _hear_ranks(self) -> None:
        """Note who serves."""
        with suppress(zmq.Again, msgspec.MsgspecError):  # on loopback anybody may say anything
            while True:
                message = self._from_ranks.decode(self._desk.recv_multipart(zmq.NOBLOCK)[-1])
                if isinstance(message, Register):
                    self._pids[message.dp_rank] = message.pid

    def _end_suspended(self) -> None:
        """End who is suspended for the lease: to the frontend it is gone, and the other ranks wait for it."""
        now_s = time.monotonic()
        self._suspended_s = {pid: self._suspended_s.get(pid, now_s) for pid in self._ranks.pids if is_suspended(pid)}
        for pid, since_s in self._suspended_s.items():
            if now_s - since_s > self._member.lease_s:
                print(f"deepserve: process {pid}, suspended for {self._member.lease_s:g} s, is ended", file=sys.stderr, flush=True)
                self._ranks.kill(pid)

    def _hear_frontend(self) -> None:
        broken, made = self._line.read_news()
        with suppress(zmq.Again, msgspec.MsgspecError):
            while True:
                message = self._from_frontend.decode(self._line.socket.recv(zmq.NOBLOCK))
                if isinstance(message, Scale) and not (broken or made):  # else it came on a connection that is gone
                    self._scale(message.dp)
        if made:
            self._introduce()

    def _scale(self, dp: int) -> None:
        try:
            self._ranks.scale(dp)
        except ValueError as error:
            self._introduce(str(error))
        else:
            self._introduce()

    def _introduce(self, error: str = "") -> None:
        self._tell(Guardian(self._member.instance, self._ranks.num_more, error))

    def _tell(self, message: Guardian | Died) -> None:
        with suppress(zmq.Again):
            self._line.socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            sys.exit(128 + number)
