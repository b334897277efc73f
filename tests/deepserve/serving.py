"""Real `deepserve serve` processes for tests."""

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import httpx
import psutil
from typer.testing import CliRunner, Result

from deepserve.cli import app

WAIT_S = 60.0  # generous: machines that run tests are busy
SERVE = ("-m", "deepserve", "serve")


def command(*arguments: str) -> Result:
    """`deepserve ...` in this process, which has imported everything: for what ends at once. An error that it does not tell is raised."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


class Served:
    """One `deepserve serve` on a free port, ready when made. A context manager; leaving it kills what still lives."""

    def __init__(self, *flags: str, model: str | Path = "deepserve-tiny", wait_ready: bool = True, launcher: Sequence[str] = SERVE):
        self.start([sys.executable, *launcher, str(model), "--port", "0", *flags], wait_ready=wait_ready)

    def start(self, command: Sequence[str], *, wait_ready: bool) -> None:
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.listen(self.process.stderr)
        try:
            self.url = self.wait_for_line(r"listening on (\S+)")
            if wait_ready:
                self.wait_for_line(r"deepserve: (ready)")
        except BaseException:
            self.kill()
            raise

    def listen(self, pipe: TextIO) -> None:
        """Gather lines from now on."""
        self.lines: list[str] = []
        self._pipe = pipe
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._reader.start()

    def _read(self, pipe: TextIO) -> None:
        for line in pipe:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()

    def wait_for_line(self, pattern: str) -> str:
        """First group of the first line on stderr that matches."""
        deadline = time.monotonic() + WAIT_S
        with self._news:
            while True:
                found = next((m for line in self.lines if (m := re.search(pattern, line))), None)
                if found:
                    return found[1]
                assert self.process.poll() is None, "the server ended:\n" + "\n".join(self.lines)
                assert self._news.wait(min(1.0, deadline - time.monotonic())) or time.monotonic() < deadline, "\n".join(self.lines)

    @property
    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def metric(self, name: str) -> float:
        """Value of a metric, summed over its labels."""
        text = httpx.get(self.url + "/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line))

    def wait_for_metric(self, name: str, value: float) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.05)  # between looks at a condition with a deadline

    def end(self, timeout_s: float = WAIT_S) -> int:
        """Wait for the process to end by itself; its exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(WAIT_S)
        return code

    def kill(self) -> None:
        """All of it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.kill()
        self.process.wait()
        self._reader.join(WAIT_S)
        self._pipe.close()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
