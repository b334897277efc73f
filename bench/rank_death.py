"""What the death of a rank costs an instance that outlives it: `--on-rank-death replan`, kill -9 of each of four ranks in turn under load.

    python bench/rank_death.py [--ranks 4] [--streams 8] [--tokens 300] [--json FILE] [-- flags of deepserve serve]

One server of the shipped model is started once. Its clients stream greedy completions; each rank is killed while they do, and the next one
once the successor has joined. Printed for each:

paused     seconds between the kill and the first token after it, by stream of a surviving rank: median and longest. Beside it the longest
           gap between two tokens of a stream in an undisturbed run.
told       seconds until the clients of the dead rank had their error event
whole      seconds until the successor had loaded and joined (the server's /ready)
same       streams of surviving ranks whose text and log-probabilities are those of the undisturbed run, of how many
Afterwards no page may be held and no request be left, and the server is still the process that was started.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

FLAGS = ("--on-rank-death", "replan", "--batch-invariant", "--max-model-len", "2048", "--num-threads", "1", "--port", "0")
LIMIT_S = 120.0


class Server:
    """One `deepserve serve`; what it says on stderr is read in a thread."""

    def __init__(self, dp: int, flags: list[str]):
        command = [sys.executable, "-m", "deepserve", "serve", "--dp", str(dp), *FLAGS, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
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
        return [int(found[1]) for line in self.lines if (found := re.search(rf"rank {rank} \(pid (\d+)\) joined", line))][-1]

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


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


def start_streams(server: Server, num: int, num_tokens: int) -> list[tuple[Stream, threading.Thread]]:
    found = []
    for i in range(num):
        body = {"model": "deepserve-tiny", "prompt": f"Count from {i} to {i + 40}:", "max_tokens": num_tokens, "temperature": 0}
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


def kill_one(server: Server, rank: int, undisturbed: list[Stream], num_tokens: int) -> Death:
    started = start_streams(server, len(undisturbed), num_tokens)
    wait_for(lambda: all(len(stream.times) > 5 for stream, _ in started))
    killed = time.monotonic()
    os.kill(server.pid_of(rank), signal.SIGKILL)
    wait_for(lambda: any("signal SIGKILL" in line for line in server.lines if f"pid {server.pid_of(rank)}" in line))
    server.wait_until_ready()
    whole = time.monotonic() - killed
    for _, thread in started:
        thread.join()
    survived = [(stream, before) for (stream, _), before in zip(started, undisturbed, strict=True) if not stream.error]
    failed = [stream for stream, _ in started if stream.error]
    pauses = [next(at for at in stream.times if at > killed + 0.005) - killed for stream, _ in survived]
    same = [stream.text == before.text and stream.logprobs == before.logprobs for stream, before in survived]
    told = max((stream.times[-1] - killed for stream in failed), default=0.0)
    return Death(rank, statistics.median(pauses), max(pauses), told, whole, sum(same), len(survived), len(failed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="flags of deepserve serve, behind --")
    args = parser.parse_args()
    server = Server(args.ranks, args.flags)
    try:
        undisturbed = start_streams(server, args.streams, args.tokens)
        for _, thread in undisturbed:
            thread.join()
        streams = [stream for stream, _ in undisturbed]
        gap = max(later - before for stream in streams for before, later in zip(stream.times, stream.times[1:], strict=False))
        machine = f"Python {platform.python_version()}, {os.cpu_count()} cores"
        print(f"{machine}: {args.ranks} ranks, {args.streams} streams of {args.tokens} tokens")
        print(f"undisturbed: longest gap between two tokens {gap:.2f} s")
        print("rank   paused, s   longest, s   told, s   whole, s   same   failed")
        deaths = []
        for rank in range(args.ranks):
            death = kill_one(server, rank, streams, args.tokens)
            same = f"{death.num_same} of {death.num_survived}"
            times = f"{death.paused_s:12.2f} {death.longest_pause_s:12.2f} {death.told_s:9.2f} {death.whole_s:10.2f}"
            print(f"{death.rank:4}{times}   {same}   {death.num_failed}", flush=True)
            deaths.append(death)
        wait_for(lambda: server.metric("vllm:num_requests_running") == server.metric("vllm:kv_cache_usage_perc") == 0)
        assert server.process.poll() is None
        print("afterwards: no request running, no page held, the server still the same process")
    finally:
        server.process.terminate()
        server.process.wait()
    if args.json:
        args.json.write_text(json.dumps({"flags": args.flags, "longest_gap_s": gap, "deaths": [asdict(d) for d in deaths]}, indent=1))


if __name__ == "__main__":
    main()
