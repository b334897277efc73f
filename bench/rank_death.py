"""What the death of a rank costs an instance that outlives it: `on_rank_death` replan, kill -9 of each of its ranks in turn under load.

    python bench/rank_death.py [--ranks 4] [--streams 8] [--late 4] [--tokens 300] [--json FILE] [-- flags of deepserve serve]
    python bench/rank_death.py --decode ...      # a cluster of one prefill rank and one decode instance, whose ranks are killed

One server of the shipped model is started once. Its clients stream greedy completions; each rank is killed while they do, just after some
more have come with long prompts (on their way to decode ranks then), and the next rank once the successor has joined. Printed for each:

paused     longest gap between two tokens of a stream of a surviving rank that ends after the kill and begins no later than 0.5 s behind
           it: median and longest over these streams. Beside it the longest gap in an undisturbed run.
told       seconds until the clients of the dead rank had their error event
whole      seconds until the successor had loaded and joined (the server's /ready)
same       streams of surviving ranks whose text and log-probabilities are those of the undisturbed run, of how many
late       the same of those that came just before the kill: what had not begun is run elsewhere
Afterwards no page may be held, in transfer or quarantined and no request be left, and nothing but the killed ranks was started again.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

FLAGS = ("--on-rank-death", "replan", "--batch-invariant", "--max-model-len", "2048", "--num-threads", "1", "--port", "0")
CLUSTER = """
[hand_off]
max_local_prefill_tokens = 0
[engine]
max_model_len = 2048
num_threads = 1
batch_invariant = true
[frontend]
port = {}
control_port = {}
[supervision]
max_restarts = 0
log_dir = "{folder}"
[[prefill]]
rdzv_port = {}
[[decode]]
dp = {dp}
engine = {{ on_rank_death = "replan" }}
rdzv_port = {}
"""
LONG = " The sea was calm, and the ship went on." * 40
LIMIT_S = 120.0


class Server:
    """One `deepserve serve` or `launch up`; what it says on stderr is read in a thread."""

    def __init__(self, command: list[str], instance: str):
        self._instance = instance
        self.process = subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()  # line by line
        self.url = wait_for(lambda: self._found(r"listening on (\S+)"))
        self.wait_until_ready()

    def _found(self, pattern: str) -> str:
        return next((found[1] for line in list(self.lines) if (found := re.search(pattern, line))), "")

    def wait_until_ready(self) -> None:
        wait_for(lambda: httpx.get(self.url + "/ready").status_code == 200)

    def pid_of(self, rank: int) -> int:
        """The latest one's, as said when it joined."""
        pattern = rf"'{self._instance}' rank {rank} \(pid (\d+)\) joined"
        return [int(found[1]) for line in self.lines if (found := re.search(pattern, line))][-1]

    def is_idle(self) -> bool:
        """Nothing runs, and all pages are free or cached."""
        text = httpx.get(self.url + "/metrics").text
        pattern = r'^(?:vllm:num_requests_running|deepserve:kv_cache_pages)\{(?!.*state="(?:free|cached)").*\} (\S+)$'
        return not any(map(float, re.findall(pattern, text, re.MULTILINE)))


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {LIMIT_S:g} s")
        time.sleep(0.01)
    return found


@dataclass
class Stream:
    """One streamed completion, read in a thread."""

    times: list[float] = field(default_factory=list)  # when each event came
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    error: str = ""

    def read(self, url: str, body: dict) -> None:
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=LIMIT_S) as reply:
            for line in reply.iter_lines():
                if not line or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                self.times.append(time.monotonic())
                if "error" in event:
                    self.error = event["error"]["message"]
                    return
                choice = event["choices"][0]
                self.text += choice["text"]
                self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])


def unified(dp: int, flags: list[str]) -> tuple[list[str], str]:
    """Command of a server, and the instance whose ranks are killed."""
    return ["deepserve", "serve", "--dp", str(dp), *FLAGS, *flags], "local"


def decode(dp: int, folder: str) -> tuple[list[str], str]:
    """The same for a cluster."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        ports = [each.getsockname()[1] for each in sockets]
    file = Path(folder) / "cluster.toml"
    file.write_text(CLUSTER.format(*ports, dp=dp, folder=folder))
    return ["launch", "up", str(file)], "decode0"


def start_streams(server: Server, num: int, num_tokens: int, about: str = "") -> list[tuple[Stream, threading.Thread]]:
    found = []
    for i in range(num):
        body = {"model": "deepserve-tiny", "prompt": f"Count from {i} to {i + 40}:{about}", "max_tokens": num_tokens, "temperature": 0}
        stream = Stream()
        thread = threading.Thread(target=stream.read, args=(server.url, {**body, "ignore_eos": True, "stream": True, "logprobs": 0}))
        thread.start()
        found.append((stream, thread))
    return found


@dataclass
class Death:
    rank: int
    paused_s: float  # median over streams
    longest_pause_s: float
    told_s: float
    whole_s: float
    num_same: int
    num_survived: int
    num_failed: int
    num_late_same: int
    num_late: int


def gaps(stream: Stream) -> list[tuple[float, float, float]]:
    """Begin, end and length of each time between two tokens."""
    return [(begin, end, end - begin) for begin, end in zip(stream.times, stream.times[1:], strict=False)]


def is_same(stream: Stream, before: Stream) -> bool:
    return not stream.error and stream.text == before.text and stream.logprobs == before.logprobs


def kill_one(server: Server, rank: int, undisturbed: list[Stream], undisturbed_late: list[Stream], num_tokens: int) -> Death:
    started = start_streams(server, len(undisturbed), num_tokens)
    wait_for(lambda: all(len(stream.times) > 5 for stream, _ in started))
    late = start_streams(server, len(undisturbed_late), num_tokens, LONG)
    time.sleep(0.02)  # some are at a rank by now, none has a token
    killed = time.monotonic()
    os.kill(server.pid_of(rank), signal.SIGKILL)
    wait_for(lambda: any("signal SIGKILL" in line for line in server.lines if f"pid {server.pid_of(rank)}" in line))
    server.wait_until_ready()
    whole = time.monotonic() - killed
    for _, thread in started + late:
        thread.join()
    survived = [(stream, before) for (stream, _), before in zip(started, undisturbed, strict=True) if not stream.error]
    failed = [stream for stream, _ in started if stream.error]
    pauses = [max(gap for begin, end, gap in gaps(stream) if end > killed and begin < killed + 0.5) for stream, _ in survived]
    same = [is_same(stream, before) for stream, before in survived]
    late_same = [is_same(stream, before) for (stream, _), before in zip(late, undisturbed_late, strict=True)]
    told = max((stream.times[-1] - killed for stream in failed), default=0.0)
    counts = sum(same), len(survived), len(failed), sum(late_same), len(late)
    return Death(rank, statistics.median(pauses), max(pauses), told, whole, *counts)


def measure(server: Server, args: argparse.Namespace) -> tuple[float, list[Death]]:
    """Longest gap of an undisturbed run; each rank's death."""
    streams, late = [], []
    for found, num, about in ((streams, args.streams, ""), (late, args.late, LONG)):
        for stream, thread in start_streams(server, num, args.tokens, about):
            thread.join()
            found.append(stream)
    gap = max(gap for stream in streams for _, _, gap in gaps(stream))
    machine = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    what = "decode ranks and one for prefill" if args.decode else "ranks"
    print(f"{machine}: {args.ranks} {what}, {args.streams} streams of {args.tokens} tokens, {args.late} late ones")
    print(f"undisturbed: longest gap between two tokens {gap:.2f} s")
    print("rank   paused, s   longest, s   told, s   whole, s   same   failed   late")
    deaths = []
    for rank in range(args.ranks):
        death = kill_one(server, rank, streams, late, args.tokens)
        same, late_same = f"{death.num_same} of {death.num_survived}", f"{death.num_late_same} of {death.num_late}"
        times = f"{death.paused_s:12.2f} {death.longest_pause_s:12.2f} {death.told_s:9.2f} {death.whole_s:10.2f}"
        print(f"{death.rank:4}{times}   {same}   {death.num_failed:6}   {late_same}", flush=True)
        deaths.append(death)
    wait_for(server.is_idle)
    again = [line for line in server.lines if "it is started again" in line]
    assert server.process.poll() is None and len(again) == args.ranks, again
    print("afterwards: no request running, no page held, in transfer or quarantined; nothing but the killed ranks was started again")
    return gap, deaths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--late", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--decode", action="store_true", help="the ranks are those of a decode instance")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="flags of deepserve serve, behind --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(*(decode(args.ranks, folder) if args.decode else unified(args.ranks, args.flags)))
        try:
            gap, deaths = measure(server, args)
        finally:
            server.process.terminate()
            server.process.wait()
    if args.json:
        args.json.write_text(json.dumps({"flags": args.flags, "longest_gap_s": gap, "deaths": [asdict(d) for d in deaths]}, indent=1))


if __name__ == "__main__":
    main()
