"""Signals and exit codes of a real server process; its engine is the fake one."""

import signal
import subprocess
import sys
import threading

import httpx
import pytest

from tests.deepserve.server.conftest import MODEL, WAIT_S, FakeEngine

PROGRAM = """
import sys
from deepserve.server.lifecycle import run_server
from deepserve.server.state import ServerOptions

class Spawn:
    def start(self, address): print("engine-address", address, file=sys.stderr, flush=True)
    def poll(self, serving): return None
    def scale(self, dp): pass
    def stop(self, grace_s): pass

sys.exit(run_server(ServerOptions(model_path=sys.argv[1], port=int(sys.argv[2])), Spawn()))
"""


class Process:
    def __init__(self, model=MODEL, port: int = 0):
        command = [sys.executable, "-c", PROGRAM, str(model), str(port)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()

    def wait_for_line(self, word: str) -> str:
        with self._news:
            assert self._news.wait_for(lambda: any(word in line for line in self.lines), WAIT_S), self.lines
        return next(line for line in self.lines if word in line)

    def wait(self) -> int:
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code


@pytest.fixture
def start():
    started = []

    def make(**options) -> Process:
        started.append(Process(**options))
        return started[-1]

    yield make
    for each in started:
        each.process.kill()
        each.process.wait()
        each.process.stderr.close()


@pytest.fixture
def running(start, tokenizer):
    """A server process whose one request is held after two tokens."""
    process = start()
    url = process.wait_for_line("listening on").split()[-1]
    address = process.wait_for_line("engine-address").split()[-1]
    engine = FakeEngine(address, tokenizer.encode("One two three", add_special_tokens=False), hold_after=2)
    process.wait_for_line("deepserve: ready")
    answers = []
    body = {"prompt": "Hi", "stream": True, "max_tokens": 8}
    request = threading.Thread(target=lambda: answers.append(httpx.post(url + "/v1/completions", json=body, timeout=WAIT_S)))
    request.start()
    engine.wait_for(lambda: engine.steps == 2, "two tokens")
    yield process, engine, request, answers
    engine.kill()


def test_sigterm_finishes_what_runs(running):
    process, engine, request, answers = running
    process.process.send_signal(signal.SIGTERM)
    process.wait_for_line("draining 1 requests")
    engine.release()
    request.join(WAIT_S)
    assert answers[0].text.endswith("data: [DONE]\n\n")
    assert process.wait() == 0
    assert process.lines[-1] == "deepserve: stopped, every request was finished"


def test_a_second_signal_stops_at_once(running):
    process, _, request, answers = running
    process.process.send_signal(signal.SIGTERM)
    process.wait_for_line("draining 1 requests")
    process.process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    request.join(WAIT_S)
    assert '"error"' in answers[0].text and "[DONE]" not in answers[0].text
    assert process.lines[-1] == "deepserve: stopped at once by a second signal"


def test_a_taken_port_is_told(start, server):
    process = start(port=server.frontend.port)
    assert process.wait() == 1
    assert process.lines[-1] == f"deepserve: cannot serve: cannot listen on 127.0.0.1:{server.frontend.port}: Address already in use"


def test_a_folder_without_a_tokenizer_is_told(start, tmp_path):
    process = start(model=tmp_path)
    assert process.wait() == 1
    assert process.lines[-1] == f"deepserve: cannot serve: {tmp_path} has no tokenizer.json"


def test_no_torch_in_the_frontend():
    code = "import sys, deepserve.server.lifecycle; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
