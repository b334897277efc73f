"""Prompts and tokens on the same ranks or on different ones: what long prompts do to streams that are under way, on two cores.

    python bench/pd_cpu.py [--prompts 12] [--prompt-tokens 1800] [--every-s 1.5] [--streams 6] [--json FILE]

Two ranks of one thread each, of the shipped model, started by `launch up`: two unified instances, or a prefill and a decode instance.
Streams of short prompts decode all the time; long prompts, all different, arrive at fixed times whatever has become of the ones before.
Told are the time to the first token of long prompts, and the time between two events of a stream. Clients and frontend share the cores.

Then bytes on the wire: prompts are handed off over TCP one after the other (`UCX_TLS=tcp`), and what the loopback's counter gains by it,
less what it gains while as many prompts of the same length are computed by the decode rank itself, is set beside what has to travel: the
prompts' pages, once. Both counts hold what clients, frontend and ranks say to each other.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np

from deepserve.config import PAGE_SIZE, EngineArgs
from deepserve.inspect import inspect_model

WAIT_S = 120.0
CHUNK = 256  # most prompt tokens of a step, so that a unified rank's streams wait for no longer chunk
LAYOUTS = {
    "unified": "[[unified]]\nrdzv_port = {}\n[[unified]]\nrdzv_port = {}\n",
    "prefill + decode": "[[prefill]]\nrdzv_port = {}\n[[decode]]\nrdzv_port = {}\n",
}
FILE = """
[engine]
max_model_len = 4096
num_threads = 1
max_num_batched_tokens = {chunk}
enable_prefix_caching = false
[hand_off]
max_local_prefill_tokens = {most_local}
[supervision]
max_restarts = 0
log_dir = "{folder}/logs"
[frontend]
port = {port}
control_port = {control}
"""


@contextlib.contextmanager
def cluster(layout: str, *, most_local: int = 64, env: dict[str, str] | None = None):
    """A client of a cluster that is ready."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        port, control, *rendezvous = [each.getsockname()[1] for each in sockets]
        stack.close()
        path = Path(folder) / "cluster.toml"
        head = FILE.format(chunk=CHUNK, most_local=most_local, folder=folder, port=port, control=control)
        path.write_text(head + LAYOUTS[layout].format(*rendezvous))
        command = [sys.executable, "-m", "launch", "up", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **(env or {})})
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, limits=httpx.Limits(max_connections=None)) as client:
                deadline = time.monotonic() + WAIT_S
                while not is_ready(client):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit(f"the cluster did not come up; {layout}")
                    time.sleep(0.1)
                yield client
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(WAIT_S)


def is_ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/ready").status_code == 200
    return False


def read_events(client: httpx.Client, prompt: list[int], num_tokens: int, ended: threading.Event | None = None) -> list[float]:
    """When the events of a stream came, after when it was asked for; until the end, or until `ended`."""
    times = [time.perf_counter()]
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                if "error" in json.loads(line[6:]):
                    raise SystemExit(f"a request failed: {line}")
                times.append(time.perf_counter())
            if ended is not None and ended.is_set():
                break
    return times


def prompt_of(rng: np.random.Generator, num_tokens: int) -> list[int]:
    return rng.integers(100, 4000, num_tokens).tolist()


def measure_streams(layout: str, args: argparse.Namespace) -> dict[str, float]:
    """Times in ms."""
    rng = np.random.default_rng(0)
    ended = threading.Event()
    gaps: list[float] = []
    firsts: list[float] = []

    def decode(client: httpx.Client, prompt: list[int]) -> None:
        while not ended.is_set():
            times = read_events(client, prompt, 2000, ended)
            gaps.extend(np.diff(times[1:]))

    def arrive(client: httpx.Client, prompt: list[int]) -> None:
        asked_s, first_s, *_ = read_events(client, prompt, 4)
        firsts.append(first_s - asked_s)

    with cluster(layout) as client:
        for num_tokens in (20, args.prompt_tokens, 20, args.prompt_tokens):  # each rank has done everything once
            read_events(client, prompt_of(rng, num_tokens), 4)
        streams = [threading.Thread(target=decode, args=(client, prompt_of(rng, 20))) for _ in range(args.streams)]
        for thread in streams:
            thread.start()
        time.sleep(1.0)
        gaps.clear()
        arrivals = []
        for _ in range(args.prompts):
            arrivals.append(threading.Thread(target=arrive, args=(client, prompt_of(rng, args.prompt_tokens))))
            arrivals[-1].start()
            time.sleep(args.every_s)
        for thread in arrivals:
            thread.join()
        ended.set()
        for thread in streams:
            thread.join()
    row = {f"first_token_p{q}": np.percentile(firsts, q) * 1e3 for q in (50, 90)}
    return row | {f"inter_token_p{q}": np.percentile(gaps, q) * 1e3 for q in (50, 90, 99)} | {"inter_token_max": max(gaps) * 1e3}


def loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def measure_wire(num_prompts: int, num_tokens: int) -> dict[str, float]:
    """Bytes of hand-offs on the wire, and the fewest that there can be."""
    gained = {}
    for name, most_local in (("handed off", 0), ("computed there", 1 << 20)):
        rng = np.random.default_rng(0)
        with cluster("prefill + decode", most_local=most_local, env={"UCX_TLS": "tcp"}) as client:
            read_events(client, prompt_of(rng, num_tokens), 4)  # connections are made
            before = loopback_bytes()
            for _ in range(num_prompts):
                read_events(client, prompt_of(rng, num_tokens), 4)
            gained[name] = loopback_bytes() - before
    page_bytes = inspect_model(EngineArgs()).bytes_per_token * PAGE_SIZE
    least = num_prompts * -(-num_tokens // PAGE_SIZE) * page_bytes
    return {"bytes": gained["handed off"] - gained["computed there"], "least_bytes": least, "other_bytes": gained["computed there"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=1800)
    parser.add_argument("--every-s", type=float, default=1.5)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--skip-wire", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load average {load:.1f} at the start")
    print(f"{args.streams} streams, a prompt of {args.prompt_tokens} tokens every {args.every_s:g} s, {args.prompts} of them; ms")
    print(f"{'':18}{'first token':>18}{'between tokens':>36}")
    print(f"{'':18}" + "".join(f"{name:>9}" for name in ("p50", "p90", "p50", "p90", "p99", "max")))
    rows = {}
    for layout in LAYOUTS:
        rows[layout] = measure_streams(layout, args)
        print(f"{layout:18}" + "".join(f"{value:9.1f}" for value in rows[layout].values()), flush=True)
    wire = None if args.skip_wire else measure_wire(args.prompts, args.prompt_tokens)
    if wire is not None:
        print(
            f"on the wire: {wire['bytes'] / 1e6:.2f} MB for {args.prompts} hand-offs, {wire['bytes'] / wire['least_bytes']:.3f} of the "
            f"{wire['least_bytes'] / 1e6:.2f} MB of their pages"
        )
    if args.json:
        args.json.write_text(json.dumps({"options": {**vars(args), "json": None}, "streams": rows, "wire": wire}, indent=1) + "\n")


if __name__ == "__main__":
    main()
