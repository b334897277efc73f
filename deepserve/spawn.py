"""Starts and watches the ranks of one local instance. No torch: the frontend starts while its ranks load theirs."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import msgspec

from deepserve.config import EngineArgs

SPIN_COUNT = 2000
# Exit code of a rank that ended because another one did (deepserve.engine.loop): it is well, and never to blame.
EXIT_PEER_LOST = 4
# Ranks that notice a death end within moments of each other; the one that died first is looked for this long. What held a GPU takes a
# second or more to be gone, even if it was killed.
BLAME_S = 5.0
# A DP replica that ends so many times in a row, each within `STEADY_S` of its start, is not started again.
MAX_FAILURES = 3
STEADY_S = 300.0


@dataclass(frozen=True)
class RankDeath:
    """A rank that ended without being told to, or that the others lost because it stands still."""

    rank: int
    pid: int
    code: int  # exit code; killed by a signal: 128 + its number; of a rank that stands still: EXIT_PEER_LOST, the others' code
    ended: bool = True
    outlived: tuple[int, ...] = ()  # pids that were lost with it, itself among them, if the instance goes on without them

    def __str__(self) -> str:
        if not self.ended:
            return f"rank {self.rank} (pid {self.pid}) stood still until the others gave it up"
        how = f"exit code {self.code}" if self.code < 128 else f"signal {signal.Signals(self.code - 128).name}"
        return f"rank {self.rank} (pid {self.pid}) ended with {how}"


class LocalInstance:
    """The engine processes of `deepserve serve` or of an `LLM`.

    They end with this process, even if it is killed: their stdin is the lifeline.
    """

    follows = False  # this process runs the frontend

    def __init__(self, args: EngineArgs, *, instance: str = "local"):
        self.num_ranks = args.data_parallel_size * args.tensor_parallel_size
        if args.num_threads is None and self.num_ranks > 1 and args.device == "cpu":
            share = max(1, (os.cpu_count() or 1) // self.num_ranks)
            args = msgspec.structs.replace(args, num_threads=share)
        self.args, self.instance = args, instance
        self._processes: dict[int, subprocess.Popen] = {}  # by rank
        self._folder: str | None = None
        self._options: dict = {}
        self._lives: Counter[int] = Counter()  # of each DP replica
        self._failures: Counter[int] = Counter()  # of each DP replica, in a row
        self._started_s: dict[int, float] = {}  # the latest life of each DP replica
        self._leaving: set[int] = set()  # DP replicas that were told to

    def start(self, frontend_address: str) -> None:
        """Start the ranks; they load, then the leaders of TP groups register at the frontend's ZMQ address."""
        self._folder = tempfile.mkdtemp(prefix="deepserve-")
        self._options = {
            "args": self.args,
            "frontends": [frontend_address],
            "instance": self.instance,
            "rendezvous": f"file:{self._folder}/rendezvous",
        }
        for dp in range(self.args.data_parallel_size):
            self._start_replica(dp)

    @property
    def pids(self) -> list[int]:
        """Of the ranks that there are, in rank order."""
        return [self._processes[rank].pid for rank in sorted(self._processes)]

    def _start_replica(self, dp: int) -> None:
        for rank in self._ranks(dp):
            self._processes[rank] = start_rank({**self._options, "rank": rank, "life": self._lives[dp]})
        self._lives[dp] += 1
        self._started_s[dp] = time.monotonic()

    def _ranks(self, dp: int) -> range:
        return range(dp * self.args.tensor_parallel_size, (dp + 1) * self.args.tensor_parallel_size)

    def poll(self, serving: Collection[int] = ()) -> RankDeath | None:
        """The rank whose death ended the instance, None while all live. Waits a moment for it to show.

        serving: processes of leaders of TP groups that have registered. Where the instance outlives the loss of ranks, it goes on as long
        as one of these lives: what is lost is started again, told at once, and told once.
        If all that ended had lost a peer, then the peer is one that still lives: it stood still for the step timeout.
        """
        if all(process.poll() is None for process in self._processes.values()):
            return None
        if self.args.on_rank_death == "replan" and (death := self._replace_dead(serving)):
            return death
        deadline = time.monotonic() + BLAME_S
        while True:
            deaths = [self._death(rank) for rank, process in self._processes.items() if process.poll() is not None]
            guilty = [death for death in deaths if death.code != EXIT_PEER_LOST]
            if guilty:
                return guilty[0]
            if time.monotonic() > deadline:
                alive = (rank for rank, process in self._processes.items() if process.poll() is None)
                stuck = next(alive, None)
                return deaths[0] if stuck is None else RankDeath(stuck, self._processes[stuck].pid, EXIT_PEER_LOST, ended=False)
            time.sleep(0.01)

    def _replace_dead(self, serving: Collection[int]) -> RankDeath | None:
        """Tell the others who is dead and start it again, with its TP group; None if nobody is left to tell."""
        replicas = [dp for dp in range(self.args.data_parallel_size) if self._ranks(dp)[0] in self._processes]
        ended = [dp for dp in replicas if any(self._processes[rank].poll() is not None for rank in self._ranks(dp))]
        if not any(self._processes[self._ranks(dp)[0]].pid in serving for dp in replicas if dp not in ended):
            return None
        dp, ranks = ended[0], self._ranks(ended[0])
        deaths = [self._death(rank) for rank in ranks if self._processes[rank].poll() is not None]
        death = next((death for death in deaths if death.code != EXIT_PEER_LOST), deaths[0])
        lost = [self._processes.pop(rank) for rank in ranks]
        for process in lost:
            _end(process)
        members = [rank + self.num_ranks * (self._lives[dp] - 1) for rank in ranks]
        for process in self._processes.values():
            _tell(process, "lost", *members)
        if time.monotonic() - self._started_s[dp] > STEADY_S:
            self._failures[dp] = 0
        self._failures[dp] += 1
        again = self._failures[dp] <= MAX_FAILURES
        if dp in self._leaving:
            self._leaving.remove(dp)
            print(f"deepserve: DP replica {dp} has left the instance", file=sys.stderr, flush=True)
            return replace(death, outlived=tuple(process.pid for process in lost))
        if again:
            self._start_replica(dp)
        what = "it is started again" if again else f"after {self._failures[dp]} times in a row it stays away"
        print(f"deepserve: {death}; the instance goes on without it, {what}", file=sys.stderr, flush=True)
        return replace(death, outlived=tuple(process.pid for process in lost))

    def scale(self, dp: int) -> None:
        """Have so many DP replicas from now on: those above finish what they have and leave, those that are missing are started.

        Raises ValueError where that cannot be.
        """
        most = self.args.data_parallel_size
        if self.args.on_rank_death != "replan":
            raise ValueError("the server can be scaled if it is started with --on-rank-death replan")
        if not 1 <= dp <= most:
            raise ValueError(f"dp must be from 1 to {most}, what the server was started with, got {dp}")
        present = [replica for replica in range(most) if self._ranks(replica)[0] in self._processes and replica not in self._leaving]
        free = [replica for replica in range(most) if self._ranks(replica)[0] not in self._processes]
        if dp > len(present) + len(free):
            raise ValueError(f"dp {dp}: {len(self._leaving)} replicas are still about to leave, ask again once they have")
        present.sort(key=self._started_s.__getitem__)  # who came last goes first: those that are still loading serve nobody
        for replica in present[dp:]:
            self._leaving.add(replica)
            for rank in self._ranks(replica):
                _tell(self._processes[rank], "leave")
        for replica in free[: max(0, dp - len(present))]:
            self._failures[replica] = 0
            self._start_replica(replica)

    def kill(self, pid: int) -> None:
        """End a rank that stands still; `poll` tells of it."""
        for process in self._processes.values():
            if process.pid == pid:
                process.kill()

    def _death(self, rank: int) -> RankDeath:
        code = self._processes[rank].returncode
        return RankDeath(rank, self._processes[rank].pid, 128 - code if code < 0 else code)

    def stop(self, grace_s: float) -> None:
        """Close the lifelines and reap; what still lives after `grace_s` seconds is killed."""
        for process in self._processes.values():
            with contextlib.suppress(OSError):  # what was told to one that has ended
                process.stdin.close()
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _tell(process: subprocess.Popen, *words: object) -> None:
    """A line for `deepserve.engine.pulse.Lifeline`."""
    with contextlib.suppress(OSError):  # it has just ended
        process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        process.stdin.flush()


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    with contextlib.suppress(OSError):
        process.stdin.close()


def start_rank(options: dict) -> subprocess.Popen:
    """One engine process; `options` are the fields of `deepserve.engine.pulse.RankOptions`. Its stdin must be kept open."""
    # Threads that wait for each other spin briefly, then sleep. Spinning as long as OpenMP likes makes a step ten times slower where
    # something else wants the cores; never spinning makes it three times slower where nothing does. `env` becomes the rank itself.
    command = ["env", f"GOMP_SPINCOUNT={SPIN_COUNT}", sys.executable, "-m", "deepserve.engine.loop"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(options) + b"\n")
    process.stdin.flush()
    return process
