"""`launch up` with real instances: they serve together, die and come back while others serve, and one Ctrl-C ends all."""

import contextlib
import json
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil

from tests.deepserve.serving import WAIT_S, Served

LEAVE_S = 5.0  # in which a dead instance leaves routing
PROMPT = {"model": "deepserve-tiny", "prompt": "In the beginning", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def free_ports(num: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Cluster(Served):
    """`launch up` of a cluster file, with the interface of `Served`; a context manager."""

    def __init__(self, folder: Path, text: str, *, wait_ready: bool = True):
        port, control, *rendezvous = free_ports(2 + text.count("[["))
        tail = f'\n[frontend]\nport = {port}\ncontrol_port = {control}\nadmin_api_key_file = "admin"\n'
        (folder / "admin").write_text("root\n")
        tail += f'[supervision]\nlog_dir = "{folder}/logs"\n' if "[supervision]" not in text else ""
        for each in rendezvous:
            text = text.replace("RDZV", str(each), 1)
        self.file = folder / "cluster.toml"
        self.file.write_text('name = "test"\n' + text.replace("LOGS", f"{folder}/logs") + tail)
        self.start([sys.executable, "-m", "launch", "up", str(self.file)], wait_ready=wait_ready)

    @property
    def frontend(self) -> psutil.Process:
        return next(p for p in psutil.Process(self.process.pid).children() if "launch.frontend" in p.cmdline())

    def ranks(self, instance: str) -> list[psutil.Process]:
        """Processes of the ranks of an instance."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "deepserve.engine.loop" in process.cmdline() and instance in process.parent().cmdline():
                    found.append(process)
        return found


def answer(server: Served) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", json=PROMPT, timeout=WAIT_S)


def wait_until(condition, what: str, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)  # between looks at a condition with a deadline


class Load:
    """Clients that ask without a pause, in threads. `failures` holds what was neither an answer nor an orderly error."""

    def __init__(self, server: Served, num_clients: int):
        self.statuses: list[int] = []
        self.failures: list[str] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(server,), daemon=True) for _ in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, server: Served) -> None:
        while not self._ended.is_set():
            reply = answer(server)
            self.statuses.append(reply.status_code)
            if reply.status_code not in (200, 500, 503) or (reply.status_code != 200 and "error" not in reply.json()):
                self.failures.append(reply.text)

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a client waits for ever"


TWO = """
[engine]
max_model_len = 4096
num_threads = 1
[[unified]]
rdzv_port = RDZV
[[unified]]
rdzv_port = RDZV
"""


def test_instances_and_frontend_die_come_back_and_leave_while_others_serve(tmp_path):
    with Cluster(tmp_path, TWO) as server:
        expected = answer(server).json()["choices"][0]["text"]
        assert {answer(server).json()["choices"][0]["text"] for _ in range(3)} == {expected}
        assert httpx.get(server.url + "/ready").json()["engines"] == 2

        load = Load(server, 4)
        (rank,) = server.ranks("unified1")
        died = time.monotonic()
        rank.kill()
        wait_until(lambda: num_engines(server) == 1, "out of routing", LEAVE_S)
        assert time.monotonic() - died < LEAVE_S
        load.end()  # starting goes faster without it
        server.wait_for_line(rf"(unified1 failed: rank 0 \(pid {rank.pid}\) ended with signal SIGKILL; it is started again)")
        wait_until(lambda: is_ready(server.url), "both are there again")
        assert [process.pid for process in server.ranks("unified1")] != [rank.pid]
        assert not load.failures and load.statuses.count(200) > 0
        # Only what had begun on the dead rank may fail: at most one request of each client.
        assert len(load.statuses) - load.statuses.count(200) <= 4

        pids = [process.pid for name in ("unified0", "unified1") for process in server.ranks(name)]
        server.frontend.kill()
        server.wait_for_line(r"(frontend failed: signal SIGKILL; it is started again)")
        wait_until(lambda: is_ready(server.url), "ranks find the new frontend")
        assert [process.pid for name in ("unified0", "unified1") for process in server.ranks(name)] == pids

        # SIGTERM to one instance: its requests are finished, new ones go elsewhere, it is not started again.
        with begun(server, 200) as first, begun(server, 200) as second:
            (leaving,) = server.ranks("unified1")
            leaving.parent().terminate()
            assert_whole(first)
            assert_whole(second)
        server.wait_for_line(r"(unified1 ended)")
        assert num_engines(server) == 1 and answer(server).status_code == 200

        everything = psutil.Process(server.process.pid).children(recursive=True)
        with begun(server, 100) as lines:
            server.process.send_signal(signal.SIGINT)
            assert_whole(lines)
        assert server.end(WAIT_S) == 0
        assert not psutil.wait_procs(everything, 5.0)[1]
        end = server.lines.index("deepserve: ending everything on this host; another signal ends it at once")
        assert not any("Traceback" in line for line in server.lines[end:])
    logs = {path.name for path in (tmp_path / "logs").iterdir()}
    assert logs >= {"frontend.log", "unified0.log", "unified1.log", "unified0", "unified1"}
    assert "[unified0.0]:" in (tmp_path / "logs/unified0.log").read_text()


def test_ctrl_c_while_instances_start(tmp_path):
    with Cluster(tmp_path, TWO, wait_ready=False) as server:  # the frontend listens, torchrun still imports
        everything = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
        assert not psutil.wait_procs(everything, 5.0)[1]
        assert server.lines[-1] == "deepserve: everything ended"
        assert not any("Traceback" in line for line in server.lines)


@contextlib.contextmanager
def begun(server: Served, num_tokens: int):
    """Lines of a stream of which the first has come."""
    body = {**PROMPT, "max_tokens": num_tokens, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=WAIT_S) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        yield lines


def assert_whole(lines) -> None:
    events = [line.removeprefix("data: ") for line in lines]
    assert events[-1] == "[DONE]" and not any("error" in json.loads(event) for event in events[:-1])


def num_engines(server: Served) -> int:
    return sum(line.startswith("vllm:num_requests_running{") for line in httpx.get(server.url + "/metrics").text.splitlines())


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url + "/ready").status_code == 200
    return False
