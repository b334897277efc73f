"""`launch up`'s supervisor, with small programs in the place of frontends and torchrun."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 20.0
SUPERVISE = """
import sys
from pathlib import Path
from launch.commands import Command
from launch.supervise import Supervisor
import launch.supervise
launch.supervise.FIRST_PAUSE_S = 0.05
names = sys.argv[3::2]
commands = [Command(name, ("python", "-u", "-c", code), {"WORD": name}) for name, code in zip(names, sys.argv[4::2])]
options = {"max_restarts": int(sys.argv[2]), "stop_timeout_s": 1.0, "lease_s": 0.3}
sys.exit(Supervisor(commands, log_dir=Path(sys.argv[1]), **options).run())
"""
WORKS = "import time; print('works'); time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('works'); time.sleep(60)"
DRAINS = """
import signal, sys, time
def end(*_):
    print("drained", time.monotonic()); sys.exit(0)
signal.signal(signal.SIGTERM, end); print("works"); time.sleep(60)
"""


class Up:
    """A supervisor over programs given as (name, Python code)."""

    def __init__(self, folder: Path, *programs: tuple[str, str], max_restarts: int = 0):
        words = [word for program in programs for word in program]
        command = [sys.executable, "-c", SUPERVISE, str(folder / "logs"), str(max_restarts), *words]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):  # closed by a test
            for line in self.process.stderr:
                with self._news:
                    self.lines.append(line.rstrip("\n"))
                    self._news.notify_all()

    def wait_for(self, pattern: str, count: int = 1) -> None:
        with self._news:
            found = self._news.wait_for(lambda: sum(bool(re.search(pattern, line)) for line in self.lines) >= count, WAIT_S)
            assert found, "\n".join(self.lines)

    def end(self) -> int:
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def up(tmp_path):
    started: list[Up] = []

    def start(*programs: tuple[str, str], **options) -> Up:
        started.append(Up(tmp_path, *programs, **options))
        return started[-1]

    yield start
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in each.children():
                process.kill()
        each.process.kill()
        each.end()


def test_lines_go_to_console_and_files(up, tmp_path):
    run = up(("a", "import os; print('hello from', os.environ['WORD']); print('no newline', end='')"), ("b", "print('x' * 100_000)"))
    assert run.end() == 0
    assert {"a | hello from a", "a | no newline", "deepserve: a ended", "deepserve: b ended"} <= set(run.lines)
    assert run.lines[-1] == "deepserve: everything ended"
    assert (tmp_path / "logs/a.log").read_text() == "hello from a\nno newline"
    assert (tmp_path / "logs/b.log").read_text() == "x" * 100_000 + "\n"
    assert sum(line.count("x") for line in run.lines if line.startswith("b | ")) == 100_000


def test_a_failure_ends_everything_with_its_code(up):
    run = up(("good", WORKS), ("bad", "import sys; input_is = sys.stdin.read(); sys.exit(7)"))
    assert run.end() == 7
    assert run.lines[-1] == "deepserve: bad failed: exit code 7; everything on this host was stopped"


def test_a_frontend_that_stays_suspended_is_ended(up):
    run = up(("frontend", WORKS), ("other", WORKS), max_restarts=1)
    run.wait_for(r"\| works", 2)
    for process in run.children():
        process.suspend()
    run.wait_for("frontend, suspended for 0.3 s, is ended")
    run.wait_for(r"frontend \| works", 2)
    assert not any("other failed" in line for line in run.lines)
    assert [process.status() for process in run.children() if process.status() == psutil.STATUS_STOPPED] == [psutil.STATUS_STOPPED]


def test_a_signal_is_told_by_its_name(up):
    run = up(("good", WORKS), ("bad", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert run.end() == 128 + signal.SIGSEGV
    assert "bad failed: signal SIGSEGV" in run.lines[-1]


def test_the_rank_that_went_first_is_named(up):
    """Not those that only lost a peer, nor torchrun, whose code is always 1."""
    code = (
        "print('[0]: deepserve: rank 0 (pid 8) ended with exit code 4 and was not told to');"
        "print('[1]: deepserve: rank 1 (pid 9) ended with signal SIGKILL and was not told to'); raise SystemExit(1)"
    )
    run = up(("decode0", code))
    assert run.end() == 128 + signal.SIGKILL
    assert run.lines[-1] == "deepserve: decode0 failed: rank 1 (pid 9) ended with signal SIGKILL; everything on this host was stopped"


def test_started_again_a_few_times_in_a_row(up):
    run = up(("good", WORKS), ("bad", "raise SystemExit(3)"), max_restarts=2)
    assert run.end() == 3
    assert sum("started bad:" in line for line in run.lines) == 3
    assert sum("started good:" in line for line in run.lines) == 1
    assert "bad failed 3 times in a row: exit code 3" in run.lines[-1]


def test_what_recovers_goes_on(up, tmp_path):
    code = f"import os, time; p={str(tmp_path / 'seen')!r}; seen = os.path.exists(p); open(p, 'w'); print('again' if seen else 'first'); "
    run = up(("frail", code + "time.sleep(60) if seen else os._exit(1)"), max_restarts=1)
    run.wait_for(r"frail \| again")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0


def test_one_signal_stops_the_frontend_first_and_then_the_rest(up):
    run = up(("unified0", DRAINS), ("frontend", DRAINS), ("unified1", DRAINS))
    run.wait_for(r"\| works", 3)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0
    ended = {line.split(" | ")[0]: float(line.split()[-1]) for line in run.lines if " | drained" in line}
    assert ended["frontend"] == min(ended.values()) and len(ended) == 3


def test_who_does_not_end_is_killed(up):
    run = up(("unified0", DEAF))
    run.wait_for(r"\| works")
    children = run.children()
    started = time.monotonic()
    run.process.terminate()
    assert run.end() == 0 and time.monotonic() - started > 1.0
    assert not psutil.wait_procs(children, 5.0)[1]


def test_a_second_signal_ends_all_at_once(up):
    run = up(("frontend", DEAF), ("unified0", DEAF))
    run.wait_for(r"\| works", 2)
    children = run.children()
    run.process.send_signal(signal.SIGINT)
    run.wait_for("ending everything")
    assert len(run.children()) == 2, "the frontend may take its time"
    run.process.send_signal(signal.SIGINT)
    run.end()
    assert not psutil.wait_procs(children, 5.0)[1]


def test_a_killed_supervisor_takes_its_children_along(up):
    run = up(("frontend", WORKS), ("unified0", WORKS))
    run.wait_for(r"\| works", 2)
    children = run.children()
    os.kill(run.process.pid, signal.SIGKILL)
    assert not psutil.wait_procs(children, 5.0)[1]


def test_a_reader_of_the_console_may_leave(up, tmp_path):
    code = "import time; print('one', flush=True); time.sleep(0.5); print('two')"
    run = up(("a", code))
    run.wait_for("one")
    run.process.stderr.close()
    assert run.process.wait(WAIT_S) == 0
    assert (tmp_path / "logs/a.log").read_text() == "one\ntwo\n"
