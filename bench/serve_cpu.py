"""Tokens per second of `deepserve serve` with the shipped model on a CPU, from one stream to many, through HTTP and SSE.

    python bench/serve_cpu.py [--streams 1 16 64] [--tokens 128] [--runs 5] [--json FILE] [-- flags of deepserve serve]

Each stream is a greedy completion of its own 32 random tokens, end tokens ignored; the next run has other ones. Tokens per second are all
tokens over the time from the first request to the last event. The clients are threads of this program and take their share of the cores.
Resident memory is summed over the server's processes behind the runs, so pages that they share count more than once; the proportional set
counts each once.
"""

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil


def start(flags: list[str]) -> tuple[subprocess.Popen, str]:
    """A server that is ready, and its address."""
    server = subprocess.Popen([sys.executable, "-m", "deepserve", "serve", "--port", "0", *flags], stderr=subprocess.PIPE, text=True)
    url = ""
    for line in server.stderr:
        found = re.search(r"listening on (\S+)", line)
        url = found[1] if found else url
        if line.strip() == "deepserve: ready":
            return server, url
    raise SystemExit("the server ended before it was ready")


def one_stream(url: str, prompt: list[int], num_tokens: int) -> None:
    body = {"model": "deepserve-tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        *events, done = [line[6:] for line in reply.read().splitlines() if line.startswith(b"data: ")]
    assert done == b"[DONE]" and json.loads(events[-1])["usage"]["completion_tokens"] == num_tokens, events[-1]


def measure(url: str, num_streams: int, num_tokens: int, runs: int) -> list[float]:
    """Tokens per second of each run; the first one warms up and is left out."""
    rng = random.Random(0)
    speeds = []
    with ThreadPoolExecutor(num_streams) as pool:
        for _ in range(runs + 1):
            prompts = [[rng.randrange(300, 4000) for _ in range(32)] for _ in range(num_streams)]
            started = time.perf_counter()
            list(pool.map(one_stream, [url] * num_streams, prompts, [num_tokens] * num_streams))
            speeds.append(num_streams * num_tokens / (time.perf_counter() - started))
    return speeds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="flags of deepserve serve, behind --")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, median of {args.runs}, load average {load:.1f} at the start")
    server, url = start(args.flags)
    try:
        rows = []
        for num_streams in args.streams:
            speeds = measure(url, num_streams, args.tokens, args.runs)
            rows.append({"streams": num_streams, "tokens_per_s": speeds})
            print(f"{num_streams:>4} streams of {args.tokens} tokens: {statistics.median(speeds):8.0f} tokens/s", flush=True)
        memory = [p.memory_full_info() for p in (psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True))]
        resident, proportional = (sum(getattr(m, kind) for m in memory) / 1e6 for kind in ("rss", "pss"))
        print(f"{len(memory)} processes, {resident:.0f} MB resident, {proportional:.0f} MB proportional")
    finally:
        server.terminate()
        server.wait()
        server.stderr.close()
    print(f"load average {os.getloadavg()[0]:.1f} at the end")
    if args.json:
        found = {"cores": os.cpu_count(), "load_average": load, "rows": rows, "resident_mb": resident, "proportional_mb": proportional}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
