"""One rank of an instance under torchrun:

    torchrun --nproc-per-node 4 -m launch.worker --dp 2 --tp 2 [the model and flags of `deepserve serve`]

Each torchrun worker is a thin *guardian*: it starts the rank as its child, watches it, and ends as it ends, so that torchrun sees
which rank went first. The guardian of rank 0 runs the frontend too. The rendezvous store is torchrun's own, in its agent, so no
rank's death takes it along. Guardians never load torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

import typer

from deepserve.cli import serve
from deepserve.config import EngineArgs
from deepserve.spawn import RankDeath, start_rank

GRACE_S = 5.0  # for a rank to end when its lifeline is cut
TOLD_S = 2.0  # for a rank to end because the frontend told all of them to
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Guardian:
    """The rank of this torchrun worker, with the interface of `LocalInstance`."""

    def __init__(self, args: EngineArgs, environment: Mapping[str, str]):
        """Raises ValueError when torchrun's numbers and the flags disagree."""
        missing = [name for name in NEEDED if name not in environment]
        if missing:
            raise ValueError(f"{', '.join(missing)} not set: start this with torchrun --nproc-per-node N -m launch.worker ...")
        num_ranks = args.data_parallel_size * args.tensor_parallel_size
        if int(environment["WORLD_SIZE"]) != num_ranks:
            raise ValueError(
                f"torchrun started {environment['WORLD_SIZE']} workers, but --data-parallel-size {args.data_parallel_size} x "
                f"--tensor-parallel-size {args.tensor_parallel_size} needs {num_ranks}"
            )
        self.args = args
        self.rank = int(environment["RANK"])
        attempt = f"{environment.get('TORCHELASTIC_RUN_ID', 'run')}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._rendezvous = f"tcp:{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}:{attempt}"
        self._process: subprocess.Popen | None = None
        self._num_signals = 0

    @property
    def follows(self) -> bool:
        """Whether another guardian runs the frontend."""
        return self.rank > 0

    def start(self, frontend_address: str) -> None:
        """Start the rank. The address is rank 0's to know; it tells the others."""
        self._process = start_rank(
            {
                "args": self.args,
                "frontends": [frontend_address] if frontend_address else [],
                "instance": "torchrun",
                "rank": self.rank,
                "rendezvous": self._rendezvous,
            }
        )

    def poll(self) -> RankDeath | None:
        """How the rank ended, None while it lives."""
        assert self._process is not None
        code = self._process.poll()
        return None if code is None else RankDeath(self.rank, self._process.pid, 128 - code if code < 0 else code)

    def stop(self, grace_s: float) -> None:
        """Wait for the rank to end with the others, as the frontend has told them; then cut the lifeline and reap."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(min(TOLD_S, grace_s))
        self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def guard(self) -> int:
        """Start the rank and wait for its end. Returns the exit code for torchrun.

        A first signal is left to the guardian of rank 0: its frontend drains and then tells all ranks to end. If it is gone, this rank
        notices and ends (deepserve.engine.lockstep). A second signal ends the rank at once.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.start("")
        try:
            assert self._process is not None
            self._process.wait()
            death = self.poll()
        finally:
            self.stop(0.0 if self._num_signals > 1 else GRACE_S)
        assert death is not None
        if death.code:
            print(f"deepserve: {death} and was not told to", file=sys.stderr, flush=True)
        return death.code

    def _on_signal(self, number: int, _frame: object) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            sys.exit(128 + number)


def launcher(environment: Mapping[str, str]):
    """What `deepserve serve` makes its instance with."""

    def make(args: EngineArgs) -> Guardian:
        try:
            return Guardian(args, environment)
        except ValueError as error:
            print(f"deepserve: {error}", file=sys.stderr)
            raise typer.Exit(1) from None

    return make


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command(name="launch.worker")(serve)
    app(obj=launcher(os.environ))


if __name__ == "__main__":
    main()
