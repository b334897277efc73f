"""Starts and watches the ranks of one local instance. No torch: the frontend starts while its ranks load theirs."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import msgspec

from deepserve.config import EngineArgs

SPIN_COUNT = 2000
# Exit code of a rank that ended because another one did (deepserve.engine.loop); it is never to blame.
EXIT_PEER_LOST = 4
# Ranks that notice a death end within moments of each other; the one that died first is looked for this long. What held a GPU takes a
# second or more to be gone, even if it was killed.
BLAME_S = 5.0


@dataclass(frozen=True)
class RankDeath:
    """A rank that ended without being told to, or that the others lost because it stands still."""

    rank: int
    pid: int
    code: int  # exit code; killed by a signal: 128 + its number; of a rank that stands still: EXIT_PEER_LOST, the others' code
    ended: bool = True

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
        self._processes: list[subprocess.Popen] = []
        self._folder: str | None = None

    def start(self, frontend_address: str) -> None:
        """Start the ranks; they load, then the leaders of TP groups register at the frontend's ZMQ address."""
        self._folder = tempfile.mkdtemp(prefix="deepserve-")
        options = {
            "args": self.args,
            "frontends": [frontend_address],
            "instance": self.instance,
            "rendezvous": f"file:{self._folder}/rendezvous",
        }
        for rank in range(self.num_ranks):
            self._processes.append(start_rank({**options, "rank": rank}))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def poll(self) -> RankDeath | None:
        """The rank whose death ended the instance, None while all live. Waits a moment for it to show.

        If all that ended had lost a peer, then the peer is one that still lives: it stood still for the step timeout.
        """
        if all(process.poll() is None for process in self._processes):
            return None
        deadline = time.monotonic() + BLAME_S
        while True:
            deaths = [self._death(rank) for rank, process in enumerate(self._processes) if process.poll() is not None]
            guilty = [death for death in deaths if death.code != EXIT_PEER_LOST]
            if guilty:
                return guilty[0]
            if time.monotonic() > deadline:
                alive = (rank for rank, process in enumerate(self._processes) if process.poll() is None)
                stuck = next(alive, None)
                return deaths[0] if stuck is None else RankDeath(stuck, self._processes[stuck].pid, EXIT_PEER_LOST, ended=False)
            time.sleep(0.01)

    def _death(self, rank: int) -> RankDeath:
        code = self._processes[rank].returncode
        return RankDeath(rank, self._processes[rank].pid, 128 - code if code < 0 else code)

    def stop(self, grace_s: float) -> None:
        """Close the lifelines and reap; what still lives after `grace_s` seconds is killed."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def start_rank(options: dict) -> subprocess.Popen:
    """One engine process; `options` are the fields of `deepserve.engine.loop.RankOptions`. Its stdin must be kept open."""
    # Threads that wait for each other spin briefly, then sleep. Spinning as long as OpenMP likes makes a step ten times slower where
    # something else wants the cores; never spinning makes it three times slower where nothing does. `env` becomes the rank itself.
    command = ["env", f"GOMP_SPINCOUNT={SPIN_COUNT}", sys.executable, "-m", "deepserve.engine.loop"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(options) + b"\n")
    process.stdin.flush()
    return process
