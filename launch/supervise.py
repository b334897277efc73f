"""`launch up`: starts this host's share of a cluster and watches it.

Every line that a process writes goes to the console behind the process's name, and to a file of its own; torchrun adds each rank's
number, and keeps files of each rank. A process that fails is started again, a few times in a row; then everything on this host ends, and
the exit code is that of whatever failed. The first Ctrl-C or SIGTERM lets the frontend finish what runs, then the instances; the second
ends all at once.
"""

import contextlib
import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deepserve.spawn import EXIT_PEER_LOST, is_suspended
from launch.commands import Command

LOOK_S = 0.1
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # before a process is started again: doubled each time
STEADY_S = 300.0  # a process that ran for so long has all its restarts again
MARGIN_S = 5.0  # for a process to end after those below it had their time
MAX_LINE_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1
_RANK_DEATH = re.compile(r"deepserve: (rank \d+ \(pid \d+\) ended with (?:exit code (\d+)|signal (\w+))) and was not told to")


class Child:
    """One command, which may be started several times."""

    def __init__(self, command: Command, log_dir: Path):
        self.command = command
        self.num_failures = 0  # in a row
        self.start_s: float | None = None  # when it is to be started again
        self.blame: tuple[str, int] | None = None  # the rank that ended first, and its exit code
        self.process: subprocess.Popen | None = None
        self.running_s = 0.0  # when it was last seen not to be suspended
        self._began_s = 0.0
        self._rest = b""
        self._log = (log_dir / f"{command.name}.log").open("ab", buffering=0)

    @property
    def name(self) -> str:
        return self.command.name

    def start(self) -> None:
        self.blame, self.start_s, self._began_s, self.running_s = None, None, time.monotonic(), time.monotonic()
        self.process = subprocess.Popen(
            _executable(self.command.argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.command.env},
            start_new_session=True,  # Ctrl-C is for the supervisor
            preexec_fn=_end_with_parent(),
        )
        os.set_blocking(self.process.stdout.fileno(), False)

    def read(self) -> Iterator[str]:
        """Lines that are there, without the newline."""
        while True:
            try:
                part = os.read(self.process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not part:
                break
            self._log.write(part)
            *lines, self._rest = (self._rest + part).split(b"\n")
            if len(self._rest) > MAX_LINE_BYTES:
                lines, self._rest = [*lines, self._rest], b""
            for line in lines:
                yield self._noted(line.decode(errors="replace"))
        if self._rest:
            yield self._noted(self._rest.decode(errors="replace"))
            self._rest = b""

    def _noted(self, line: str) -> str:
        found = _RANK_DEATH.search(line)
        if found and self.blame is None and found[2] != str(EXIT_PEER_LOST):
            code = int(found[2]) if found[2] else 128 + signal.Signals[found[3]]
            self.blame = found[1], code
        return line

    def failed(self) -> tuple[str, int]:
        """How it ended, as a sentence's end and an exit code; counts it."""
        if time.monotonic() - self._began_s > STEADY_S:
            self.num_failures = 0
        self.num_failures += 1
        if self.blame is not None:
            return self.blame
        code = self.process.returncode
        return (f"exit code {code}", code) if code > 0 else (f"signal {signal.Signals(-code).name}", 128 - code)

    def close(self) -> None:
        """What the process leaves behind goes with it; its descendants see that they are orphans."""
        if self.process is not None:
            self.process.stdout.close()
            self.process = None

    def close_log(self) -> None:
        self._log.close()


class Supervisor:
    """`run` it in the main thread."""

    def __init__(self, commands: list[Command], *, log_dir: Path, max_restarts: int, stop_timeout_s: float, lease_s: float):
        """lease_s: how long a frontend may be suspended, whose clients hear nothing meanwhile."""
        log_dir.mkdir(parents=True, exist_ok=True)
        self._children = [Child(command, log_dir) for command in commands]
        self._max_restarts, self._stop_timeout_s = max_restarts, stop_timeout_s
        self._lease_s = lease_s
        self._selector = selectors.DefaultSelector()
        self._num_signals = 0
        self._code = 0
        self._last_line = "everything ended"
        self._told: set[str] = set()  # who was asked to end
        self._stopping = False
        self._deadline_s: float | None = None  # of those that were asked last

    def run(self) -> int:
        """Until everything has ended; the exit code is 0 or that of what failed."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for child in self._children:
                self._start(child)
            while any(child.process is not None or child.start_s is not None for child in self._children):
                self._look()
        finally:
            for child in self._alive():
                child.process.kill()
                child.process.wait()
            for child in self._children:
                child.close()
                child.close_log()
            self._selector.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        say(self._last_line)
        return self._code

    def _look(self) -> None:
        for key, _ in self._selector.select(LOOK_S):
            self._relay(key.data)
        for child in self._children:
            if child.process is not None and child.process.poll() is not None:
                self._on_end(child)
            elif child.start_s is not None and time.monotonic() >= child.start_s:
                self._start(child)
            elif child.name == "frontend" and child.process is not None:
                self._end_suspended(child)
        if self._num_signals and not self._stopping:
            self._stop(None)
        if self._stopping:
            self._go_on_stopping()

    def _end_suspended(self, child: Child) -> None:
        """End it if it is suspended for the lease: its clients hear nothing, and a new one would serve."""
        if not is_suspended(child.process.pid):
            child.running_s = time.monotonic()
        elif time.monotonic() - child.running_s > self._lease_s:
            say(f"{child.name}, suspended for {self._lease_s:g} s, is ended")
            child.process.kill()

    def _start(self, child: Child) -> None:
        child.start()
        self._selector.register(child.process.stdout, selectors.EVENT_READ, child)
        say(f"started {child.name}: {child.command}")

    def _relay(self, child: Child) -> None:
        for line in child.read():
            # torchrun tells of a signal by a traceback, which is for its file; lines of ranks have their number in front.
            if not self._stopping or child.command.argv[0] != "torchrun" or line.startswith("["):
                _write(f"{child.name} | {line}")

    def _on_end(self, child: Child) -> None:
        self._relay(child)
        self._selector.unregister(child.process.stdout)
        ended_well = child.process.returncode == 0
        how, code = ("", 0) if ended_well or self._stopping else child.failed()
        child.close()
        if self._stopping:
            return
        if ended_well:
            say(f"{child.name} ended")
        elif child.num_failures > self._max_restarts:
            times = "" if child.num_failures == 1 else f" {child.num_failures} times in a row"
            self._code, self._last_line = code, f"{child.name} failed{times}: {how}; everything on this host was stopped"
            self._stop(self._stop_timeout_s)
        else:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (child.num_failures - 1))
            child.start_s = time.monotonic() + pause_s
            say(f"{child.name} failed: {how}; it is started again in {pause_s:g} s ({child.num_failures} of {self._max_restarts})")

    # -- ending --

    def _stop(self, timeout_s: float | None) -> None:
        """timeout_s: for the frontend to finish what runs; None: as long as that takes."""
        self._stopping = True
        say("ending everything on this host; another signal ends it at once")
        for child in self._children:
            child.start_s = None
        self._ask(lambda child: child.name == "frontend", timeout_s)

    def _go_on_stopping(self) -> None:
        if self._num_signals > 1 or (self._deadline_s is not None and time.monotonic() > self._deadline_s):
            for child in self._alive():
                if child.name in self._told or self._num_signals > 1:
                    child.process.kill()
        if not any(child.name in self._told for child in self._alive()):
            self._ask(lambda child: True, self._stop_timeout_s + MARGIN_S)

    def _ask(self, whom: Callable[[Child], bool], timeout_s: float | None) -> None:
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for child in self._alive():
            if whom(child):
                self._told.add(child.name)
                child.process.send_signal(signal.SIGTERM)

    def _alive(self) -> list[Child]:
        return [child for child in self._children if child.process is not None and child.process.poll() is None]

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._num_signals += 1


def say(line: str) -> None:
    _write(f"deepserve: {line}")


def _write(line: str) -> None:
    # Whoever read the console may be gone; that must not end the cluster.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _executable(argv: tuple[str, ...]) -> list[str]:
    """With this Python, whatever the PATH holds."""
    names = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    return [*names.get(argv[0], [argv[0]]), *argv[1:]]


def _end_with_parent() -> Callable[[], None] | None:
    """For a child to call: on Linux, have it told to end when its parent is killed."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec little is allowed
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
