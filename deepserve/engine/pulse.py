"""What a rank is told at start, and the threads beside its engine: the heart beats for it, the lifeline listens to who started it."""

import math
import os
import threading
import time
from contextlib import suppress
from typing import BinaryIO

import msgspec
import zmq

from deepserve.config import EngineArgs
from deepserve.control import dealer
from deepserve.messages import Heartbeat, Load
from deepserve.spawn import EXIT_PEER_LOST

HEARTBEAT_S = 1.0
LINGER_MS = 1000  # for the last messages to leave
EXIT_ORPHANED = 3  # the process that started this rank is gone


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told at start."""

    args: EngineArgs
    frontends: list[str]  # ZMQ addresses to connect to; rank 0's count, it tells the others
    instance: str = "local"
    role: str = "unified"
    rank: int = 0
    life: int = 0  # how many ranks of this number came before; this one joins those that there are
    rendezvous: str = ""  # "file:PATH" or "tcp:HOST:PORT:PREFIX"; needed with several ranks
    address: str = "127.0.0.1"  # IPv4 address at which the other ranks of the instance reach this one
    secret: str = ""  # of the control sockets; empty: plain ones, on loopback
    dead_link_s: float | None = None  # after which a connection to a frontend that does not answer is made anew; None: never


class Heart(threading.Thread):
    """Beats to every frontend, so that a rank in a long step is slow and not dead. It has sockets of its own: ZMQ's are not shared."""

    def __init__(self, context: zmq.Context, options: RankOptions, dp_rank: int, *, limit_s: float | None = None):
        """limit_s: a turn that takes so long ends the process, since the other ranks have gone on without it; None: they end as well."""
        super().__init__(name="heart", daemon=True)
        self.load = Load()  # replaced by the engine thread after each step
        self.turn_s = time.monotonic()  # when the latest turn of the engine thread began; it says so
        self._options, self._dp_rank = options, dp_rank
        self._context, self._limit_s = context, math.inf if limit_s is None else limit_s
        self._stopped = threading.Event()

    def run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        options = self._options
        # Who has not read the last beats does not miss the next one: an idle `LLM` reads nothing for hours.
        how = {"most_waiting": 8, "secret": options.secret, "dead_link_s": options.dead_link_s}
        sockets = [dealer(self._context, **how) for _ in options.frontends]
        for socket, address in zip(sockets, options.frontends, strict=True):
            socket.connect(address)
        while not self._stopped.wait(HEARTBEAT_S):
            beat = encoder.encode(Heartbeat(options.instance, self._dp_rank, self.load))
            for socket in sockets:
                with suppress(zmq.Again):
                    socket.send(beat, zmq.NOBLOCK)
            if time.monotonic() - self.turn_s > self._limit_s:
                os._exit(EXIT_PEER_LOST)
        for socket in sockets:
            socket.close(LINGER_MS)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


class Lifeline(threading.Thread):
    """The pipe from whoever started this rank. When it ends, so does the rank, at once.

    A line "drain" asks the instance, "leave" the rank's DP replica, to end in its own time; "lost 2 5" says that these members are dead.
    """

    def __init__(self, stdin: BinaryIO):
        super().__init__(name="lifeline", daemon=True)
        self.drain, self.leave = threading.Event(), threading.Event()
        self.lost: set[int] = set()  # members (`deepserve.engine.membership`); never changed in place
        self._stdin = stdin
        self.news, self._bell = os.pipe()  # readable once there is something to look at: wakes a rank that is parked
        os.set_blocking(self.news, False)

    def run(self) -> None:
        for line in self._stdin:
            word, *numbers = line.decode().split()
            if word == "lost":
                self.lost = self.lost | set(map(int, numbers))
            else:
                {"drain": self.drain, "leave": self.leave}[word].set()
            os.write(self._bell, b"!")
        os._exit(EXIT_ORPHANED)

    def hush(self) -> None:
        """What there was to look at is being looked at."""
        with suppress(BlockingIOError):
            os.read(self.news, 1 << 12)
