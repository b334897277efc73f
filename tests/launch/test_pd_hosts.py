"""Prefill and decode instances on different hosts: pages cross the network, which then is slow, loses frames, and is cut."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepserve.config import PAGE_SIZE, EngineArgs
from deepserve.inspect import inspect_model
from launch.cluster import load
from tests.launch.network import Network, SlowNetwork
from tests.launch.test_hosts import Process
from tests.launch.test_pd import CASES, LEASE_S, LEAVE_S, ask, begin, check_answers, expected, hand_offs, pages_return, wait_for_balance
from tests.launch.test_up import is_ready, num_engines, wait_until

__all__ = ["expected"]  # a fixture

pytestmark = pytest.mark.long

FILE = f"""
name = "pd-hosts"
hosts = [HOSTS]
secret_file = "secret"
lease_s = {LEASE_S}
[hand_off]
lease_s = {LEASE_S}
max_local_prefill_tokens = 0
[engine]
max_model_len = 2048
num_threads = 1
num_pages = 256
dtype = "float32"
[frontend]
host = "LAST"
listen = "LAST"
[supervision]
max_restarts = 20
log_dir = "LOGS"
[[prefill]]
tp = 2
hosts = ["FIRST"]
env = {{ UCX_TLS = "tcp" }}
[[decode]]
dp = 2
nodes = NODES
hosts = [OTHERS]
env = {{ UCX_TLS = "tcp" }}
"""


class Hosts:
    """`launch up` on each host: prefill on the first, decode on all others, the frontend on the last."""

    def __init__(self, network: Network, folder: Path):
        self.network = network
        self.first, *others = network.hosts
        quoted = [f'"{host}"' for host in network.hosts]
        text = FILE.replace("HOSTS", ", ".join(quoted)).replace("OTHERS", ", ".join(quoted[1:])).replace("NODES", str(len(others)))
        text = text.replace("FIRST", self.first).replace("LAST", others[-1]).replace("LOGS", str(folder / "logs"))
        self.file = folder / "cluster.toml"
        self.file.write_text(text)
        (folder / "secret").write_text("0123456789abcdef" * 4)
        self.cluster = load(self.file)
        self.ups = {host: Process(network, host, f"python -m launch up {self.file} --host {host}") for host in network.hosts}
        self.url = f"http://{others[-1]}:8000"

    def rank(self, host: str):
        """One of a host's."""
        return self.ups[host].ranks()[0]

    def close(self) -> None:
        for process in self.ups.values():
            process.kill()


def networks() -> Iterator[pytest.param]:
    yield pytest.param(lambda: Network(2), id="two hosts")
    yield pytest.param(lambda: Network(3), id="three hosts")
    yield pytest.param(lambda: SlowNetwork(2, delay_s=0.025, loss=0.01), id="50 ms and 1 % lost")


@pytest.fixture(scope="module", params=networks())
def hosts(request, tmp_path_factory):
    with request.param() as network:
        started = Hosts(network, tmp_path_factory.mktemp("pd-hosts"))
        try:
            wait_until(lambda: is_ready(started.url), "ready")
            yield started
        finally:
            started.close()


def test_pages_cross_the_network(hosts, expected):
    least = (
        sum(-(-len(case["prompt"]) // PAGE_SIZE) for case in CASES) * PAGE_SIZE * inspect_model(EngineArgs(dtype="float32")).bytes_per_token
    )
    before = hosts.network.sent_bytes(hosts.first)
    # Each with a cache of its own: some begin alike, and what is there is not sent again.
    replies = [ask(hosts, case["prompt"], cache_salt=str(number)).json() for number, case in enumerate(CASES)]
    assert [reply["choices"][0]["text"] for reply in replies] == expected
    assert hand_offs(hosts, "taken") == len(CASES)
    sent = hosts.network.sent_bytes(hosts.first) - before
    # Beside pages: messages, what TP ranks say stays on the host. A page that goes twice, or to both decode ranks, would be seen.
    assert least < sent < 1.4 * least
    wait_for_balance(hosts)


def test_a_cut_prefill_host_costs_nobody_an_answer(hosts, expected):
    askers = begin(hosts, 24, 12)
    hosts.network.cut(hosts.first)
    cut_s = time.monotonic()
    try:
        answers = askers.told_in_time(hosts, cut_s)
        wait_until(lambda: num_engines(hosts) == 2, "out of routing", LEAVE_S)
        pages_return(hosts, "decode0", cut_s)
    finally:
        hosts.network.mend(hosts.first)
    check_answers(answers, expected)
    assert [status for status, _, _ in answers] == [200] * 24
    wait_for_balance(hosts)


@pytest.mark.parametrize("hosts", [lambda: Network(3)], indirect=True, ids=["three hosts"])
def test_a_cut_decode_host_leaves_no_client_waiting(hosts, expected):
    """Its instance stands still on the other host too; what was handed to it, or is on its way there, ends with an error."""
    askers = begin(hosts, 24, 400)
    cut = next(host for host in hosts.cluster.instance("decode0").hosts if host != hosts.cluster.frontend.host)
    hosts.network.cut(cut)
    cut_s = time.monotonic()
    try:
        answers = askers.told_in_time(hosts, cut_s)
        pages_return(hosts, "prefill0", cut_s)
    finally:
        hosts.network.mend(cut)
    check_answers(answers, expected)
    assert any(status != 200 for status, _, _ in answers)
    wait_for_balance(hosts)
    assert ask(hosts, CASES[0]["prompt"]).json()["choices"][0]["text"] == expected[0]


def test_a_killed_rank_of_either_role(hosts, expected):
    for host, num_left in ((hosts.first, 2), (hosts.cluster.instance("decode0").hosts[0], 1)):
        askers = begin(hosts, 24, 60)
        hosts.rank(host).kill()
        killed_s = time.monotonic()
        wait_until(lambda num_left=num_left: num_engines(hosts) <= num_left, "out of routing", LEAVE_S)
        check_answers(askers.told_in_time(hosts, killed_s), expected)
        wait_for_balance(hosts)
    assert ask(hosts, CASES[0]["prompt"]).json()["choices"][0]["text"] == expected[0]
