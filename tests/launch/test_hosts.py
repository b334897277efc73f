"""A cluster over two hosts, started by the printed lines on one and by `launch up` on the other; then links are cut and ranks killed."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
import zmq

from launch.cluster import load
from launch.commands import commands
from tests.deepserve.serving import WAIT_S, Served
from tests.launch.network import Network
from tests.launch.test_up import PROMPT, answer, assert_whole, begun, is_ready, num_engines, wait_until

# Two hosts whose links break and whose ranks restart: too long, and too easily held up by a busy machine, for each run.
pytestmark = pytest.mark.long

LEASE_S = 4.0
LEAVE_S = 5.0
NUM_TOKENS = 30
HIDDEN, MOE_LAYERS = 256, 5  # of the shipped model
FILE = """
name = "two-hosts"
hosts = [HOSTS]
secret_file = "secret"
lease_s = {lease}
[engine]
max_model_len = 4096
num_threads = 1
batch_invariant = true
[frontend]
listen = "FIRST"
[supervision]
log_dir = "LOGS"
[[unified]]
name = "wide"
dp = 2
nodes = 2
[[unified]]
name = "near"
hosts = ["FIRST"]
""".replace("{lease}", str(LEASE_S))


class Process(Served):
    """One command on a host; what it started ends with it."""

    def __init__(self, network: Network, host: str, line: str):
        self.start([*network.on(host), "sh", "-c", f"exec {line}"], wait_ready=False)

    def start(self, command, *, wait_ready: bool) -> None:
        # `python` and `torchrun` of the lines are those of this test.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        where = {**os.environ, "PATH": path}
        self.process = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env=where)
        self.listen(self.process.stdout)

    def ranks(self) -> list[psutil.Process]:
        """Those that it has started."""
        return [p for p in psutil.Process(self.process.pid).children(recursive=True) if "deepserve.engine.loop" in _command(p)]


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


class TwoHosts:
    """The cluster; `url` is the frontend's. `lines`: what `render` prints for the first host, by name."""

    def __init__(self, network: Network, folder: Path):
        self.network = network
        self.first, self.second = network.hosts
        text = FILE.replace("HOSTS", ", ".join(f'"{host}"' for host in network.hosts)).replace("FIRST", self.first)
        (folder / "cluster.toml").write_text(text.replace("LOGS", str(folder / "logs")))
        (folder / "secret").write_text("0123456789abcdef" * 4)
        self.file = folder / "cluster.toml"
        self.cluster = load(self.file)
        self.lines = {command.name: str(command) for command in commands(self.cluster, self.first)}
        self.by_hand = {name: Process(network, self.first, line) for name, line in self.lines.items()}
        self.up = Process(network, self.second, f"python -m launch up {self.file}")
        self.frontend = self.by_hand["frontend"]
        self.url = f"http://{self.first}:8000"

    def start_again(self, name: str) -> None:
        """A line of the first host whose process has ended."""
        self.by_hand[name].kill()
        self.by_hand[name] = Process(self.network, self.first, self.lines[name])

    def close(self) -> None:
        for process in (*self.by_hand.values(), self.up):
            process.kill()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with Network(2) as network:
        cluster = TwoHosts(network, tmp_path_factory.mktemp("two-hosts"))
        try:
            wait_until(lambda: is_ready(cluster.url), "ready")
            yield cluster
        finally:
            cluster.close()


def test_an_instance_over_two_hosts_gives_the_same_answer(two):
    assert sorted(two.lines) == ["frontend", "near", "wide-node0"]
    assert httpx.get(two.url + "/ready").json()["engines"] == 3
    before = {host: two.network.sent_bytes(host) for host in two.network.hosts}
    body = {**PROMPT, "max_tokens": NUM_TOKENS}
    # In turn on all three ranks, since they are equally idle.
    replies = [httpx.post(two.url + "/v1/completions", json=body, timeout=WAIT_S).json() for _ in range(6)]
    assert len({reply["choices"][0]["text"] for reply in replies}) == 1
    # Two requests at least ran on the wide instance: in each layer a token's activations went to an expert of the other host, in bf16.
    # Votes and heartbeats alone would be a quarter of it.
    least = 2 * NUM_TOKENS * MOE_LAYERS * HIDDEN * 2
    assert all(two.network.sent_bytes(host) - before[host] > least for host in two.network.hosts)


def test_a_stranger_on_the_network_is_refused_and_logged(two):
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(two.cluster.control_address)
    stranger.send(b"let me in", zmq.NOBLOCK)
    two.frontend.wait_for_line(r"(refused a connection from 10\.\d+\.\d+\.254:\d+: it does not know the secret)")
    stranger.close(0)
    context.term()
    assert num_engines(two) == 3


def test_sockets_listen_on_the_hosts_address_only(two):
    """Control sockets and collectives; torchrun's own store listens everywhere, as its documents say."""
    found = subprocess.run([*two.network.on(two.first), "ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    rows = [(line.split()[3].rpartition(":")[0], line) for line in found.splitlines()]
    torchruns = {two.by_hand[name].process.pid for name in ("near", "wide-node0")}
    ours = {address for address, line in rows if int(re.search(r"pid=(\d+)", line)[1]) not in torchruns}
    assert ours <= {"127.0.0.1", two.first}, found


def test_a_cut_link_leaves_no_client_waiting(two):
    """The instance over both hosts stands still; the one on the frontend's host goes on."""
    wait_until(lambda: not any(num_running(two).values()), "no report is of an earlier request")  # they would sway the router
    readers = []
    for _ in range(4):
        readers.append(Reader(two.url))
        assert readers[-1].begun.wait(WAIT_S)
    wait_until(lambda: sum(num_running(two).values()) == 4, "all are reported")
    num_near = num_running(two)["near-0"]
    assert 0 < num_near < 4
    two.network.cut(two.second)
    cut = time.monotonic()
    try:
        wait_until(lambda: "instance 'wide' has been quiet" in "\n".join(two.frontend.lines), "out of routing", LEAVE_S)
        assert all(answer(two).status_code == 200 for _ in range(3))
        wait_until(lambda: sum(reader.is_alive() for reader in readers) == num_near, "those of the wide one end", LEASE_S + LEAVE_S)
        assert time.monotonic() - cut < LEASE_S + LEAVE_S
    finally:
        two.network.mend(two.second)
    assert all("error" in json.loads(reader.last) for reader in readers if not reader.is_alive())
    for going_on in [reader for reader in readers if reader.is_alive()]:
        going_on.hang_up()
    wait_until(lambda: is_ready(two.url) and num_engines(two) == 3, "whole again")
    assert all(answer(two).status_code == 200 for _ in range(6))


def num_running(two) -> dict[str, int]:
    """Sequences that run on each rank, by its label."""
    text = httpx.get(two.url + "/metrics").text
    found = re.findall(r'^vllm:num_requests_running\{engine="([^"]*)".*\} (\S+)$', text, re.MULTILINE)
    return {label: int(float(value)) for label, value in found}


class Reader(threading.Thread):
    """A client that reads a long stream."""

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.last = ""  # line
        self._url, self._enough = url, threading.Event()
        self.start()

    def run(self) -> None:
        body = {**PROMPT, "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", self._url + "/v1/completions", json=body, timeout=WAIT_S) as reply:
            for line in reply.iter_lines():
                if line:
                    self.last = line.removeprefix("data: ")
                    self.begun.set()
                if self._enough.is_set():
                    return

    def hang_up(self) -> None:
        self._enough.set()
        self.join(WAIT_S)
        assert not self.is_alive()


def test_a_killed_rank_takes_its_instance_and_both_come_back(two):
    """The other host's `launch up` starts its part again; the first host's is started again by hand."""
    (rank,) = two.up.ranks()
    rank.kill()
    wait_until(lambda: num_engines(two) == 1, "out of routing", LEAVE_S)
    assert answer(two).status_code == 200
    two.by_hand["wide-node0"].process.wait(WAIT_S)
    two.start_again("wide-node0")
    wait_until(lambda: is_ready(two.url), "back under the same name")
    with begun(two, 20) as lines:
        assert_whole(lines)
