"""Preflight of a cluster: what one host finds, what hosts find together, and whole runs on two addresses of this machine."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launch import host_check
from launch.cluster import load
from launch.host_check import device_clashes, file_hashes, port_clashes, shared_memory_clashes, transfer_clashes
from launch.rollcall import Collector, Here, Member, Report, compare
from tests.launch.test_up import free_ports

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "deepserve/models/deepserve-tiny"
SECRET = "0123456789abcdef" * 2
HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
WAIT_S = 20.0


def test_compare_names_hosts_and_values():
    same = {"torch": "2.13.0", "python": "3.11.7"}
    reports = [
        Report("a", same, {"w.safetensors": "1" * 64}, ["port 8000 (frontend) cannot be taken: Address already in use"]),
        Report("b", {**same, "torch": "2.12.0"}, {"w.safetensors": "2" * 64}),
        Report("c", same, {"w.safetensors": "1" * 64, "extra.json": "3" * 64}),
    ]
    assert compare(reports) == [
        "a: port 8000 (frontend) cannot be taken: Address already in use",
        "version of torch differs: 2.13.0 on a, c; 2.12.0 on b",
        "model file extra.json differs: missing on a, b; 3333333333333333 on c",
        "model file w.safetensors differs: 1111111111111111 on a, c; 2222222222222222 on b",
    ]
    assert compare([reports[2], reports[2]]) == []


def test_every_file_that_loading_reads_is_hashed(tmp_path):
    for name in ("config.json", "model.safetensors", "chat_template.jinja", "README.md"):
        (tmp_path / name).write_text(name)
    before = file_hashes(tmp_path)
    assert set(before) == {"config.json", "model.safetensors", "chat_template.jinja"}
    (tmp_path / "model.safetensors").write_text("model.safetensorz")
    after = file_hashes(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}


def cluster_file(folder: Path, text: str, *, port: int = 0, control: int | None = None) -> Path:
    control = control or free_ports(1)[0]
    path = folder / "cluster.toml"
    path.write_text(f"{text}\n[frontend]\nport = {port}\ncontrol_port = {control}\n[[unified]]\nrdzv_port = {free_ports(1)[0]}\n")
    return path


def test_ports_that_somebody_has(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as control:
        taken = http.getsockname()[1], control.getsockname()[1]
        cluster = load(cluster_file(tmp_path, "", port=taken[0], control=taken[1]))
        assert port_clashes(cluster, "127.0.0.1") == [
            f"port {taken[0]} (frontend) cannot be taken: Address already in use",
            f"port {taken[1]} (control port) cannot be taken: Address already in use",
        ]
    assert port_clashes(cluster, "127.0.0.1") == []


def test_instances_that_hand_over_need_what_moves_pages(tmp_path, monkeypatch):
    path = tmp_path / "cluster.toml"
    path.write_text("[[unified]]\n[[prefill]]\n[[decode]]\ndp = 2\n")
    cluster = load(path)
    assert transfer_clashes(cluster, "127.0.0.1") == []
    monkeypatch.setattr(host_check, "find_spec", lambda _: None)
    (clash,) = transfer_clashes(cluster, "127.0.0.1")
    assert clash == "library nixl is not installed, decode0, prefill0 need it to hand pages over: pip install 'deepserve[pd]'"
    assert transfer_clashes(cluster, "127.0.0.2") == [], "nothing of them runs there"


def test_more_ranks_than_devices(tmp_path):
    path = tmp_path / "cluster.toml"
    accelerated = 'engine = { device = "cuda" }'
    path.write_text(f"[[unified]]\ndp = 60\n{accelerated}\n[[unified]]\ndp = 40\n{accelerated}\n")
    clashes, _ = device_clashes(load(path), "127.0.0.1")
    assert any(clash.startswith("100 ranks need a device 'cuda' each, there are ") for clash in clashes), clashes
    path.write_text('[[unified]]\nengine = { device = "abacus" }\n')
    clashes, drivers = device_clashes(load(path), "127.0.0.1")
    assert clashes == ["devices 'abacus' cannot be listed: ValueError: unknown device 'abacus', known are: cpu, cuda"] and drivers == {}


def test_too_little_shared_memory(tmp_path, monkeypatch):
    assert shared_memory_clashes(tmp_path / "nowhere") == []
    monkeypatch.setattr(host_check, "MIN_SHARED_BYTES", 1)
    assert shared_memory_clashes(tmp_path) == []
    monkeypatch.setattr(host_check, "MIN_SHARED_BYTES", 1 << 60)
    (clash,) = shared_memory_clashes(tmp_path)
    assert clash.endswith(f"MiB, collectives of devices need {1 << 40}")


# -- together --


class Party:
    """A collector and members in threads."""

    def __init__(self, *, wait_s: float = WAIT_S, reports_s: float = WAIT_S):
        self.collector = Collector(HOSTS, "tcp://127.0.0.1:*", secret=SECRET, wait_s=wait_s, reports_s=reports_s)
        self.collector.start()
        self.verdicts: dict[str, list[str] | None] = {}
        self._threads: list[threading.Thread] = []

    def join(self, host: str, report: Report, *, secret: str = SECRET, ask_s: float = WAIT_S) -> None:
        def run() -> None:
            with Member(host, self.collector.address, secret=secret) as member:
                unreached = member.call(ask_s)
                if unreached is None:
                    self.verdicts[host] = None
                    return
                report.clashes += unreached
                self.verdicts[host] = member.settle(report)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def end(self) -> dict[str, list[str] | None]:
        for thread in (*self._threads, self.collector):
            thread.join(WAIT_S)
            assert not thread.is_alive()
        return self.verdicts


def test_all_hosts_hear_every_clash():
    party = Party()
    for number, host in enumerate(HOSTS):
        party.join(host, Report(host, {"torch": "2" if number else "1"}, clashes=["the disk is full"] if number == 2 else []))
    expected = ["127.0.0.3: the disk is full", "version of torch differs: 1 on 127.0.0.1; 2 on 127.0.0.2, 127.0.0.3"]
    assert party.end() == dict.fromkeys(HOSTS, expected)


def test_who_does_not_come_or_knows_no_secret_is_missed():
    party = Party(wait_s=1.0)
    party.join(HOSTS[0], Report(HOSTS[0]))
    party.join(HOSTS[1], Report(HOSTS[1]), secret=SECRET[::-1], ask_s=-4.0)
    assert party.end() == {HOSTS[0]: [f"{host} did not come within 1 s" for host in HOSTS[1:]], HOSTS[1]: None}


def test_clocks_unreachable_hosts_and_silent_ones_are_told():
    party = Party(reports_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with Member(HOSTS[2], party.collector.address, secret=SECRET) as silent:
        silent._send(Here(HOSTS[2], port, time.time() - 100))
        for host in HOSTS[:2]:
            party.join(host, Report(host))
        found = party.end()[HOSTS[0]]
    assert found[0].startswith("the clock of 127.0.0.3 is -100.") and found[0].endswith("s off that of 127.0.0.1")
    assert found[1] == "127.0.0.3 sent no report within 1 s"
    assert [clash.split(": [")[0] for clash in found[2:]] == [f"{host}: {host} cannot reach 127.0.0.3" for host in HOSTS[:2]]


def start(file: Path, host: str, folder: Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "launch", "preflight", str(file), "--host", host, *flags]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("equal", [True, False])
def test_preflight_of_two_hosts(tmp_path, equal):
    """They see different folders under the model's name, as hosts with disks of their own do."""
    (tmp_path / "secret").write_text(SECRET)
    text = 'model = "model"\nsecret_file = "secret"\nhosts = ["127.0.0.1", "127.0.0.2"]'
    file = cluster_file(tmp_path, text)
    running = []
    for host in HOSTS[:2]:
        folder = tmp_path / host
        (folder / "model").mkdir(parents=True)
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(MODEL / name, folder / "model")
        (folder / "model/model.safetensors").write_bytes(b"weights" if equal else host.encode())
        running.append(start(file, host, folder))
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == ([0, 0] if equal else [1, 1]), outputs
    for output in outputs:
        assert "all well" in output if equal else "CLASH: model file model.safetensors differs: " in output
        assert equal or "1 clashes" in output


def test_a_host_alone_is_told_that_the_first_does_not_answer(tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    file = cluster_file(tmp_path, 'secret_file = "secret"\nhosts = ["127.0.0.1", "127.0.0.2"]')
    process = start(file, "127.0.0.2", tmp_path, "--wait-s", "-4")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "CLASH: 127.0.0.1 does not answer on port" in output
