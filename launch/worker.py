"""One rank of an instance under torchrun. With a frontend of its own, or as an instance of a cluster file:

    torchrun --nproc-per-node 4 -m launch.worker --dp 2 --tp 2 [the model and flags of `deepserve serve`]
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        -m launch.worker --cluster cluster.toml --instance decode0

Each torchrun worker is a thin *guardian*: it starts the rank as its child, watches it, and ends as it ends, so that torchrun sees which
rank went first. Without a cluster file the guardian of rank 0 runs the frontend too. The rendezvous store is torchrun's own, in its agent,
so no rank's death takes it along. Guardians never load torch. With `--on-rank-death replan` torchrun starts one worker, and it holds all
ranks.
"""

import argparse
import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import typer

from deepserve.cli import serve
from deepserve.config import EngineArgs
from deepserve.spawn import LocalInstance, RankDeath, is_suspended, start_rank
from launch.cluster import Membership, load
from launch.host_guardian import HostGuardian

GRACE_S = 5.0  # for a rank to end when its lifeline is cut
TOLD_S = 2.0  # for a rank to end because the frontend told all of them to
WATCH_S = 1.0  # between looks at torchrun
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Guardian:
    """The rank of this torchrun worker, with the interface of `LocalInstance`."""

    def __init__(self, args: EngineArgs, environment: Mapping[str, str], membership: Membership | None = None):
        """Raises ValueError when torchrun's numbers and the flags disagree."""
        check_workers(args, environment)
        self.args, self.membership = args, membership
        self.rank = int(environment["RANK"])
        attempt = f"{environment.get('TORCHELASTIC_RUN_ID', 'run')}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._rendezvous = f"tcp:{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}:{attempt}"
        self._address = "127.0.0.1" if args.num_nodes == 1 else own_address(environment["MASTER_ADDR"])
        self._torchrun = os.getppid()
        self._process: subprocess.Popen | None = None
        self._num_signals = 0
        self._suspended_s = 0.0

    @property
    def follows(self) -> bool:
        """Whether the frontend runs elsewhere."""
        return self.rank > 0 or self.membership is not None

    def start(self, frontend_address: str) -> None:
        """Start the rank. The address is rank 0's to know; it tells the others."""
        options = {
            "args": self.args,
            "frontends": [frontend_address] if frontend_address else [],
            "instance": "torchrun",
            "rank": self.rank,
            "rendezvous": self._rendezvous,
            "address": self._address,
        }
        if self.membership is not None:
            member = self.membership
            options |= {"frontends": [member.frontend], "instance": member.instance, "role": member.role}
            options |= {"secret": member.secret, "dead_link_s": member.lease_s}
        self._process = start_rank(options)

    def poll(self, serving: Collection[int] = ()) -> RankDeath | None:
        """How the rank ended, None while it lives."""
        assert self._process is not None
        code = self._process.poll()
        return None if code is None else RankDeath(self.rank, self._process.pid, 128 - code if code < 0 else code)

    def kill(self, pid: int) -> None:
        """End the rank."""
        assert self._process is not None and self._process.pid == pid
        self._process.kill()

    def scale(self, dp: int) -> None:
        """Raises ValueError."""
        raise ValueError(f"dp {dp}: an instance under torchrun has the ranks that torchrun was started with")

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

        A first signal asks an instance of a cluster to finish what it has. Otherwise it is left to the guardian of rank 0: its frontend
        drains and then tells all ranks to end; if it is gone, this rank notices and ends (deepserve.engine.lockstep). A second signal
        ends the rank at once, and so does the end of torchrun.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.start("")
        try:
            death = None
            while death is None and os.getppid() == self._torchrun:
                death = self._wait()
        finally:
            self.stop(GRACE_S if self._num_signals < 2 and os.getppid() == self._torchrun else 0.0)
        death = death or self.poll()
        assert death is not None
        if death.code:
            print(f"deepserve: {death} and was not told to", file=sys.stderr, flush=True)
        return death.code

    def _wait(self) -> RankDeath | None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WATCH_S)
        if self.membership is not None and self._process.poll() is None:
            self._end_suspended(self.membership.lease_s)
        return self.poll()

    def _end_suspended(self, lease_s: float) -> None:
        """End a rank that is suspended for so long: to the others it is gone. It must not go on later, and write to pages of theirs."""
        self._suspended_s = self._suspended_s + WATCH_S if is_suspended(self._process.pid) else 0.0
        if self._suspended_s >= lease_s:
            print(f"deepserve: rank {self.rank} has been suspended for {lease_s:g} s, it is ended", file=sys.stderr, flush=True)
            self._process.kill()
            self._process.wait()

    def _on_signal(self, number: int, _frame: object) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            sys.exit(128 + number)
        if self.membership is not None and self._process is not None:
            with contextlib.suppress(OSError):  # it is gone
                os.write(self._process.stdin.fileno(), b"drain\n")


def check_workers(args: EngineArgs, environment: Mapping[str, str]) -> None:
    """Raises ValueError when torchrun's numbers and the flags disagree."""
    missing = [name for name in NEEDED if name not in environment]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: start this with torchrun --nproc-per-node N -m launch.worker ...")
    num_ranks, num_workers = args.data_parallel_size * args.tensor_parallel_size, environment["WORLD_SIZE"]
    if args.on_rank_death == "replan" and num_workers != "1":
        raise ValueError(
            f"torchrun started {num_workers} workers, but with --on-rank-death replan one of them holds all ranks, since torchrun ends all "
            "its workers with the first: --nproc-per-node 1"
        )
    if args.on_rank_death == "fail" and int(num_workers) != num_ranks:
        raise ValueError(
            f"torchrun started {num_workers} workers, but --data-parallel-size {args.data_parallel_size} x "
            f"--tensor-parallel-size {args.tensor_parallel_size} needs {num_ranks}"
        )


def own_address(peer: str) -> str:
    """The IPv4 address under which machines that reach `peer` reach this one. Raises ValueError."""
    try:
        address = socket.gethostbyname(peer)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            mine = probe.getsockname()[0]
    except OSError as error:
        raise ValueError(f"no way from this machine to MASTER_ADDR {peer!r}: {error}") from None
    if ipaddress.ip_address(mine).is_loopback and not _is_address(peer):
        # Distributions give a machine's own name an address that no other machine reaches.
        raise ValueError(f"MASTER_ADDR {peer!r} is {mine} on this machine, which others cannot reach: give torchrun --local-addr ADDRESS")
    return mine


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def launcher(environment: Mapping[str, str]):
    """What `deepserve serve` makes its instance with."""

    def make(args: EngineArgs) -> Guardian | LocalInstance:
        try:
            if args.on_rank_death == "replan":
                check_workers(args, environment)
                return LocalInstance(args)
            return Guardian(args, environment)
        except ValueError as error:
            print(f"deepserve: {error}", file=sys.stderr)
            raise typer.Exit(1) from None

    return make


def guard_member(argv: list[str], environment: Mapping[str, str]) -> int:
    """Run one rank of an instance of a cluster file; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launch.worker")
    parser.add_argument("--cluster", type=Path, required=True, help="cluster file")
    parser.add_argument("--instance", required=True, help="its name there")
    parser.add_argument("--hosts", type=lambda text: text.split(","), help="replaces the file's hosts")
    parser.add_argument("--frontend", metavar="HOST:PORT", help="where ranks find the frontend, instead of the file's")
    flags = parser.parse_args(argv)
    try:
        cluster = load(flags.cluster, flags.hosts)
        instance = cluster.instance(flags.instance)
        frontend = cluster.control_address if flags.frontend is None else f"tcp://{flags.frontend}"
        member = Membership(instance.name, instance.role, frontend, cluster.secret(), cluster.lease_s)
        check_workers(instance.args, environment)
        replans = instance.args.on_rank_death == "replan"
        guardian = HostGuardian(instance.args, member) if replans else Guardian(instance.args, environment, member)
    except ValueError as error:
        print(f"deepserve: {error}", file=sys.stderr)
        return 1
    return guardian.guard()


def main() -> None:
    if "--cluster" in sys.argv:
        sys.exit(guard_member(sys.argv[1:], os.environ))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command(name="launch.worker")(serve)
    app(obj=launcher(os.environ))


if __name__ == "__main__":
    main()
