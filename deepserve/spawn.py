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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
MOST_REPLICAS = 64  # that a command may ask for: a slip of the hand must not start a thousand
LIVES_APART = 1 << 16  # life `n` of a rank is member `rank + n * LIVES_APART` of its instance (deepserve.engine.membership)


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
    """The engine processes of `deepserve serve`, of an `LLM`, or of an instance of a cluster that outlives its ranks.

    They end with this process, even if it is killed: their stdin is the lifeline.
    """

    follows = False  # this process runs the frontend

    def __init__(self, args: EngineArgs, *, instance: str = "local", options: Mapping[str, Any] | None = None):
        """options: more fields of `deepserve.engine.pulse.RankOptions`, alike for all ranks."""
        self.num_ranks = args.data_parallel_size * args.tensor_parallel_size
        if args.num_threads is None and self.num_ranks > 1 and args.device == "cpu":
            share = max(1, (os.cpu_count() or 1) // self.num_ranks)
            args = msgspec.structs.replace(args, num_threads=share)
        self.args, self.instance = args, instance
        self._processes: dict[int, subprocess.Popen] = {}  # by rank
        self._folder: str | None = None
        self._options = dict(options or {})
        self._lives: Counter[int] = Counter()  # of each DP replica
        self._failures: Counter[int] = Counter()  # of each DP replica, in a row
        self._started_s: dict[int, float] = {}  # the latest life of each DP replica
        self._leaving: set[int] = set()  # DP replicas that were told to
        self._draining = False
        self._blame_until_s: float | None = None  # after a rank ended since it had lost another one
        self.num_more = 0  # DP replicas that were asked for beyond those of `args`; below 0: fewer

    def start(self, *frontends: str) -> None:
        """Start the ranks; they load, then the leaders of TP groups register at these ZMQ addresses."""
        self._folder = tempfile.mkdtemp(prefix="deepserve-")
        self._options |= {
            "args": self.args,
            "frontends": list(frontends),
            "instance": self.instance,
            "rendezvous": f"file:{self._folder}/rendezvous",
        }
        for dp in range(self.args.data_parallel_size):
            self._start_replica(dp)

    @property
    def pids(self) -> list[int]:
        """Of the ranks that there are, in rank order."""
        return [self._processes[rank].pid for rank in sorted(self._processes)]

    @property
    def _replicas(self) -> list[int]:
        """DP replicas that there are."""
        return sorted({rank // self.args.tensor_parallel_size for rank in self._processes})

    def _start_replica(self, dp: int) -> None:
        for rank in self._ranks(dp):
            self._processes[rank] = start_rank({**self._options, "rank": rank, "life": self._lives[dp]})
        self._lives[dp] += 1
        self._started_s[dp] = time.monotonic()

    def _ranks(self, dp: int) -> range:
        return range(dp * self.args.tensor_parallel_size, (dp + 1) * self.args.tensor_parallel_size)

    def poll(self, serving: Collection[int] = ()) -> RankDeath | None:
        """The rank whose death ended the instance, None while all live, and for `BLAME_S` at most while it has not shown. Never waits.

        serving: processes of leaders of TP groups that have registered. Where the instance outlives the loss of ranks, it goes on as long
        as one of these lives: what is lost is started again, told at once, and told once.
        If all that ended had lost a peer, then the peer is one that still lives: it stood still for the step timeout.
        """
        if self._draining:
            for ranks in map(self._ranks, self._replicas):
                if all(self._processes[rank].poll() == 0 for rank in ranks):
                    for rank in ranks:
                        del self._processes[rank]
        if all(process.poll() is None for process in self._processes.values()):
            self._blame_until_s = None
            return None
        if self.args.on_rank_death == "replan" and (death := self._replace_dead(serving)):
            return death
        deaths = [self._death(rank) for rank, process in self._processes.items() if process.poll() is not None]
        guilty = [death for death in deaths if death.code != EXIT_PEER_LOST]
        if guilty:
            return guilty[0]
        if self._blame_until_s is None:
            self._blame_until_s = time.monotonic() + BLAME_S
        if time.monotonic() < self._blame_until_s:
            return None
        stuck = next((rank for rank, process in self._processes.items() if process.poll() is None), None)
        return deaths[0] if stuck is None else RankDeath(stuck, self._processes[stuck].pid, EXIT_PEER_LOST, ended=False)

    def _replace_dead(self, serving: Collection[int]) -> RankDeath | None:
        """Tell the others who is dead and start it again, with its TP group; None if nobody is left to tell."""
        replicas = self._replicas
        ended = [dp for dp in replicas if any(self._processes[rank].poll() is not None for rank in self._ranks(dp))]
        if not any(self._processes[self._ranks(dp)[0]].pid in serving for dp in replicas if dp not in ended):
            return None
        dp, ranks = ended[0], self._ranks(ended[0])
        deaths = [self._death(rank) for rank in ranks if self._processes[rank].poll() is not None]
        death = next((death for death in deaths if death.code != EXIT_PEER_LOST), deaths[0])
        lost = [self._processes.pop(rank) for rank in ranks]
        for process in lost:
            _end(process)
        members = [rank + LIVES_APART * (self._lives[dp] - 1) for rank in ranks]
        for process in self._processes.values():
            _tell(process, "lost", *members)
        if time.monotonic() - self._started_s[dp] > STEADY_S:
            self._failures[dp] = 0
        self._failures[dp] += 1
        again = self._failures[dp] <= MAX_FAILURES and not self._draining
        gone = replace(death, outlived=tuple(process.pid for process in lost))
        if dp in self._leaving:
            self._leaving.remove(dp)
            print(f"deepserve: DP replica {dp} has left the instance", file=sys.stderr, flush=True)
            return gone
        if again:
            self._start_replica(dp)
        stays_away = "until it ends" if self._draining else f"after {self._failures[dp]} times in a row it stays away"
        what = "it is started again" if again else stays_away
        print(f"deepserve: {death}; the instance goes on without it, {what}", file=sys.stderr, flush=True)
        return gone

    def drain(self, serving: Collection[int]) -> None:
        """Have the ranks finish what they have and end, and those end at once that do not serve yet. `pids` says who is left."""
        self._draining = True
        for ranks in map(self._ranks, self._replicas):
            loads = self._processes[ranks[0]].pid not in serving
            for rank in ranks:
                if loads:
                    _end(self._processes.pop(rank))
                else:
                    _tell(self._processes[rank], "drain")

    def scale(self, dp: int) -> None:
        """Have so many DP replicas from now on: those above finish what they have and leave, those that are missing are started.

        There may be more than the instance was started with. Raises ValueError where that cannot be.
        """
        if self.args.on_rank_death != "replan":
            raise ValueError("the server can be scaled if it is started with --on-rank-death replan")
        if self._draining:
            raise ValueError(f"dp {dp}: the instance is about to end")
        if not 1 <= dp <= MOST_REPLICAS:
            raise ValueError(f"dp must be from 1 to {MOST_REPLICAS}, got {dp}")
        self.num_more = dp - self.args.data_parallel_size
        there = self._replicas
        present = [replica for replica in there if replica not in self._leaving]
        free = [replica for replica in range(len(there) + dp) if replica not in there]
        present.sort(key=self._started_s.__getitem__)  # who came last goes first: those that are still loading serve nobody
        for replica in present[dp:]:
            self._leaving.add(replica)
            for rank in self._ranks(replica):
                _tell(self._processes[rank], "leave")
        for replica in free[: max(0, dp - len(present))]:
            self._failures[replica] = 0
            self._lives[replica] = max(1, self._lives[replica])  # it joins, whatever its number
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


def is_suspended(pid: int) -> bool:
    """By SIGSTOP or the like; not by a debugger. On Linux; elsewhere it is never known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def start_rank(options: dict) -> subprocess.Popen:
    """One engine process; `options` are the fields of `deepserve.engine.pulse.RankOptions`. Its stdin must be kept open."""
    # Threads that wait for each other spin briefly, then sleep. Spinning as long as OpenMP likes makes a step ten times slower where
    # something else wants the cores; never spinning makes it three times slower where nothing does. `env` becomes the rank itself.
    command = ["env", f"GOMP_SPINCOUNT={SPIN_COUNT}", sys.executable, "-m", "deepserve.engine.loop"]
    # A process group of its own: Ctrl-C is for whoever started the rank, also while the rank is still importing. Until it is in that group
    # signals wait, and the rank ignores them once it runs.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(options) + b"\n")
    process.stdin.flush()
    return process
