"""What clients of a PD cluster see of faults: who hears of one when, and when pages are back. Needs root on Linux.

    python -m bench.pd_faults [--lease-s 5] [--clients 24] [--only KILL] [--json FILE]

The shipped model under `launch up` on three hosts, which are network namespaces: a prefill instance of two TP ranks, a decode instance of
two DP ranks, and a second decode instance beside the frontend. Clients ask without a pause for streams: prompts of 200 to 1,000 tokens,
all different, and 40 tokens of each. So a fault finds requests in every phase: waiting for pages, waiting for a prefill rank, computed
there, on their way, decoded. Each fault then is left alone for a lease and 7 s.

A client is *affected* if its request ends with an error or a broken connection, or is sent elsewhere by the frontend, as its log says.
It is *told* at that moment, counted from the fault or from its asking, whichever was later. Clients that a fault does not concern go on:
the longest that anyone waited for a sign (an event, an end) from the fault on is set beside, with whatever time a retry took to compute.
Pages are back when no survivor has any in transfer or quarantined that were so at the fault; new hand-offs go on meanwhile, so that is
read at ranks of instances that live, once nothing of theirs is quarantined (and the frontend, which tells it, is there).
"""

import argparse
import contextlib
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.launch.network import Network, why_not

WAIT_S = 120.0
MARGIN_S = 5.0  # beyond the lease, in which clients are to be told
AFTER_S = 7.0  # beyond the lease, for which a fault is watched
FILE = """
name = "faults"
hosts = [{hosts}]
secret_file = "secret"
lease_s = {lease}
[hand_off]
lease_s = {lease}
[engine]
max_model_len = 2048
num_threads = 1
num_pages = 512
[frontend]
host = "{last}"
listen = "{last}"
[supervision]
max_restarts = 100
log_dir = "{folder}/logs"
[[prefill]]
tp = 2
hosts = ["{first}"]
env = {{ UCX_TLS = "tcp" }}
[[decode]]
dp = 2
hosts = ["{second}"]
env = {{ UCX_TLS = "tcp" }}
[[decode]]
hosts = ["{last}"]
env = {{ UCX_TLS = "tcp" }}
"""
RETRIED = re.compile(r"request \S+ is sent elsewhere (\S+) s after it came")


@dataclass
class Request:
    """As its client sees it; times of `time.monotonic`."""

    asked_s: float
    events_s: list[float] = field(default_factory=list)
    error: str = ""
    ended_s: float | None = None


class Hosts:
    """The cluster; a context manager."""

    def __init__(self, network: Network, folder: Path, lease_s: float):
        self.network = network
        self.first, self.second, self.last = network.hosts
        quoted = ", ".join(f'"{host}"' for host in network.hosts)
        names = {"first": self.first, "second": self.second, "last": self.last}
        (folder / "cluster.toml").write_text(FILE.format(hosts=quoted, lease=lease_s, folder=folder, **names))
        (folder / "secret").write_text("0123456789abcdef" * 4)
        self.url = f"http://{self.last}:8000"
        self.retried: list[tuple[float, float]] = []  # when a request was sent elsewhere, and when it had come
        self._ups = [self._start(host, folder / "cluster.toml") for host in network.hosts]

    def _start(self, host: str, file: Path) -> subprocess.Popen:
        command = [*self.network.on(host), sys.executable, "-m", "launch", "up", str(file), "--host", host]
        up = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(up.stderr,), daemon=True).start()
        return up

    def _read(self, pipe) -> None:
        for line in pipe:
            if found := RETRIED.search(line):
                now_s = time.monotonic()
                self.retried.append((now_s, now_s - float(found[1])))

    def __enter__(self) -> "Hosts":
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for up in self._ups:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(up.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            up.kill()
            up.wait()

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + "/ready").status_code == 200 and sum(self.open_pages("").values()) == 0:
                    return
            time.sleep(0.1)
        raise SystemExit(f"the cluster is not ready: {self.open_pages('')}")

    def processes(self, word: str, host: str) -> list[psutil.Process]:
        """Of a host, those with this word in their command."""
        found = []
        for process in psutil.Process(self._ups[self.network.hosts.index(host)].pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if word in process.cmdline():
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def open_pages(self, instance: str) -> dict[str, int]:
        """Quarantined, by rank of an instance, or of all."""
        with contextlib.suppress(httpx.HTTPError):
            text = httpx.get(self.url + "/metrics", timeout=2.0).text
            pattern = rf'^deepserve:kv_cache_pages\{{engine="({instance}[^"]*)".*state="quarantined"\}} (\S+)$'
            return {engine: int(float(value)) for engine, value in re.findall(pattern, text, re.MULTILINE)}
        return {"?": 1}


class Load:
    """Clients that ask without a pause."""

    def __init__(self, url: str, num_clients: int, seed: int):
        self.requests: list[Request] = []
        self._url, self._ended = url, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(seed * 1000 + i),)) for i in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, rng: random.Random) -> None:
        while not self._ended.is_set():
            prompt = [rng.randrange(100, 4000) for _ in range(rng.randrange(200, 1000))]
            request = Request(time.monotonic())
            self.requests.append(request)
            try:
                self._ask(request, prompt)
            except httpx.HTTPError as error:
                request.error = str(error) or type(error).__name__
            request.ended_s = time.monotonic()
            if request.error:
                self._ended.wait(0.5)

    def _ask(self, request: Request, prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", self._url + "/v1/completions", json=body, timeout=WAIT_S) as reply:
            if reply.status_code != 200:
                request.error = reply.read().decode()
                return
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    request.events_s.append(time.monotonic())
                    if "error" in (event := json.loads(line[6:])):
                        request.error = event["error"]["message"]

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            if thread.is_alive():
                raise SystemExit("a client waits for ever")


def cut_path(hosts: Hosts) -> None:
    """Nothing goes from the decode ranks' host to the prefill ranks'; both reach the frontend."""
    subprocess.run([*hosts.network.on(hosts.second), "ip", "route", "add", "blackhole", f"{hosts.first}/32"], check=True)


def mend_path(hosts: Hosts) -> None:
    subprocess.run([*hosts.network.on(hosts.second), "ip", "route", "delete", "blackhole", f"{hosts.first}/32"], check=True)


RANK, FRONTEND = "deepserve.engine.loop", "launch.frontend"


def signalled(number: int, word: str, host: str, which: slice) -> Callable[[Hosts], None]:
    def act(hosts: Hosts) -> None:
        for process in hosts.processes(word, getattr(hosts, host))[which]:
            process.send_signal(number)

    return act


def faults() -> dict[str, tuple[Callable[[Hosts], None], Callable[[Hosts], None] | None, str]]:
    """What happens, what ends it, and whose pages are to come back."""
    found = {}
    for verb, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        found[f"{verb} prefill leader"] = signalled(number, RANK, "first", slice(0, 1)), None, "decode"
        found[f"{verb} prefill follower"] = signalled(number, RANK, "first", slice(1, 2)), None, "decode"
        found[f"{verb} decode rank"] = signalled(number, RANK, "second", slice(1, 2)), None, "decode1"
        found[f"{verb} frontend"] = signalled(number, FRONTEND, "last", slice(0, 1)), None, "decode"
    for name, host, survivors in (("prefill", "first", "decode"), ("decode", "second", "decode1")):
        found[f"cut host of {name}"] = (
            lambda hosts, host=host: hosts.network.cut(getattr(hosts, host)),
            lambda hosts, host=host: hosts.network.mend(getattr(hosts, host)),
            survivors,
        )
    found["cut prefill-decode path"] = cut_path, mend_path, "decode"
    return found


def watch(hosts: Hosts, survivors: str, fault_s: float, until_s: float) -> float:
    """When the survivors had no page in quarantine any more, after the fault; 0 if they never had."""
    back_s = 0.0
    while (now_s := time.monotonic()) < until_s:
        if any(hosts.open_pages(survivors).values()):
            back_s = time.monotonic() - fault_s
        time.sleep(max(0.0, now_s + 0.1 - time.monotonic()))
    return back_s


def measure(hosts: Hosts, name: str, args: argparse.Namespace, seed: int) -> dict[str, float]:
    begin, end, survivors = faults()[name]
    load = Load(hosts.url, args.clients, seed)
    time.sleep(args.warm_s)
    open_then = [request for request in load.requests if request.ended_s is None]
    num_begun = sum(bool(request.events_s) for request in open_then)
    fault_s = time.monotonic()
    begin(hosts)
    until_s = fault_s + args.lease_s + AFTER_S
    back_s = watch(hosts, survivors, fault_s, until_s)
    if end is not None:
        end(hosts)
    load.end()
    requests = [request for request in load.requests if request.asked_s < until_s and (request.ended_s or until_s) > fault_s]
    told = [request.ended_s - max(fault_s, request.asked_s) for request in requests if request.error]
    num_errors = len(told)
    told += [at_s - max(fault_s, came_s) for at_s, came_s in hosts.retried if fault_s < at_s and came_s < until_s]
    signs = [next((s for s in (*r.events_s, r.ended_s) if s > fault_s), until_s) - max(fault_s, r.asked_s) for r in requests]
    hosts.retried.clear()
    hosts.wait_until_ready()
    in_time = sum(wait_s <= args.lease_s + MARGIN_S for wait_s in told)
    return {
        "open": len(open_then),
        "begun": num_begun,
        "affected": len(told),
        "errors": num_errors,
        "in_time": in_time / len(told) if told else 1.0,
        "longest_s": max(told, default=0.0),
        "longest_sign_s": max(signs),
        "pages_back_s": back_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lease-s", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--warm-s", type=float, default=3.0, help="of load before each fault")
    parser.add_argument("--only", default="", help="faults with this in their names")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the start")
    print(f"{args.clients} clients, lease {args.lease_s:g} s; in time: told within the lease and {MARGIN_S:g} s; s")
    print(f"{'':26}{'open':>6}{'begun':>7}{'affected':>10}{'errors':>8}{'in time':>9}{'longest':>9}{'any sign':>10}{'pages back':>12}")
    rows = {}
    with tempfile.TemporaryDirectory() as folder, Network(3) as network, Hosts(network, Path(folder), args.lease_s) as hosts:
        for seed, name in enumerate(name for name in faults() if args.only in name):
            row = rows[name] = measure(hosts, name, args, seed)
            counts = f"{row['open']:6}{row['begun']:7}{row['affected']:10}{row['errors']:8}{row['in_time']:9.1%}"
            print(f"{name:26}{counts}{row['longest_s']:9.2f}{row['longest_sign_s']:10.2f}{row['pages_back_s']:12.1f}", flush=True)
    total = sum(row["affected"] for row in rows.values())
    in_time = sum(row["affected"] * row["in_time"] for row in rows.values())
    longest = max(row["longest_s"] for row in rows.values())
    print(
        f"all: {in_time:.0f} of {total} affected clients told in time ({in_time / max(1, total):.2%}), the last one after {longest:.2f} s"
    )
    if args.json:
        args.json.write_text(json.dumps({"options": {**vars(args), "json": None}, "faults": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
