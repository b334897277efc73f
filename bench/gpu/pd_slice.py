"""Prefill on some GPUs of a host, decode on the others: V3's geometry with FP8 dummy weights, started by `launch up`, asked over HTTP.

    python bench/gpu/pd_slice.py [--tp 4] [--dp 4] [--layers 61] [--experts 128] [--input 1024] [--output 2048] [--requests 512] [--json F]

Prefill takes the first `tp` GPUs, decode the next `dp`, pages travel over NIXL. All requests are there at the start, each with a prompt of
its own, greedy, and none stops early; before that a few warm up. `--experts` is of the whole model, and each instance holds all of them:
V3's 256 do not fit four GPUs of 140 GB, half of them do. Told are the whole time, prompts included, by output tokens of each GPU, and what
the frontend's own metrics say of first tokens, of the time between tokens, and of hand-offs.
"""

import argparse
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
from decode_slice import v3

from deepserve.model.hub import SHIPPED_FOLDER

FILE = """
model = "{folder}/model"
[engine]
load_format = "dummy"
device = "{device}"
max_model_len = {length}
max_num_batched_tokens = 8192
max_num_seqs = {seqs}
max_dispatch_tokens_per_rank = {seqs}
enable_prefix_caching = false
{more}
[hand_off]
max_local_prefill_tokens = 0
[frontend]
port = {ports[0]}
control_port = {ports[1]}
[supervision]
max_restarts = 0
log_dir = "{folder}/logs"
[[prefill]]
tp = {tp}
rdzv_port = {ports[2]}
env = {{ CUDA_VISIBLE_DEVICES = "{first}" }}
[[decode]]
dp = {dp}
rdzv_port = {ports[3]}
env = {{ CUDA_VISIBLE_DEVICES = "{second}" }}
"""
REHEARSAL = 'weight_format = "fp8"\ndtype = "float32"\nnum_threads = 1\ngraphs = true'
# Sums and counts of the frontend, in seconds.
TIMES = {"first token": "vllm:time_to_first_token_seconds", "between tokens": "vllm:inter_token_latency_seconds",
         "hand-off": "deepserve:hand_off_seconds"}  # fmt: skip


@contextlib.contextmanager
def cluster(args: argparse.Namespace) -> Iterator[httpx.Client]:
    """A client of a cluster that is ready."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        ports = [each.getsockname()[1] for each in sockets]
        stack.close()
        shutil.copytree(SHIPPED_FOLDER, f"{folder}/model", ignore=shutil.ignore_patterns("*.safetensors"))
        Path(folder, "model/config.json").write_text(json.dumps(v3(args.layers, args.experts, narrow=args.device == "cpu")))
        gpus = [str(number) for number in range(args.tp + args.dp)]
        written = FILE.format(
            folder=folder, device=args.device, length=-(-(args.input + args.output + 64) // 64) * 64, seqs=-(-args.requests // args.dp),
            more=REHEARSAL if args.device == "cpu" else "", ports=ports, tp=args.tp, dp=args.dp,
            first=",".join(gpus[: args.tp]), second=",".join(gpus[args.tp :]),
        )  # fmt: skip
        Path(folder, "cluster.toml").write_text(written)
        process = subprocess.Popen([sys.executable, "-m", "launch", "up", f"{folder}/cluster.toml"], stdout=sys.stderr)
        try:
            limits = httpx.Limits(max_connections=None)
            with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=args.limit_s, limits=limits) as client:
                deadline = time.monotonic() + args.limit_s
                while not is_ready(client):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit("the cluster did not come up; what its processes said is above")
                    time.sleep(0.1)
                yield client
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def is_ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/ready").status_code == 200
    return False


def told(client: httpx.Client) -> dict[str, tuple[float, float]]:
    """Sum and count of each of `TIMES`, over all labels."""
    text = client.get("/metrics").text
    return {name: tuple(sum(map(float, re.findall(rf"^{metric}_{part}(?:{{.*}})? (\S+)", text, re.M))) for part in ("sum", "count"))
            for name, metric in TIMES.items()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=4, help="GPUs of the prefill instance")
    parser.add_argument("--dp", type=int, default=4, help="GPUs of the decode instance")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=128, help="routed experts of the model")
    parser.add_argument("--input", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--output", type=int, default=2048, help="generated tokens")
    parser.add_argument("--requests", type=int, default=512, help="at once")
    parser.add_argument("--device", default="cuda", help="cpu only rehearses, with narrow layers")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for the start, and for each request")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng, started = np.random.default_rng(0), time.perf_counter()
    vocab_size = v3(args.layers, args.experts, narrow=args.device == "cpu")["vocab_size"]
    with cluster(args) as client, ThreadPoolExecutor(args.requests) as pool:
        start_s = time.perf_counter() - started

        def ask(max_tokens: int) -> int:
            prompt = rng.integers(2, vocab_size, args.input).tolist()
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            reply = client.post("/v1/completions", json=body)
            reply.raise_for_status()
            return reply.json()["usage"]["completion_tokens"]

        list(pool.map(ask, [8] * 2 * args.dp))  # each rank has done everything once
        before, begun = told(client), time.perf_counter()
        total = sum(pool.map(ask, [args.output] * args.requests))
        took_s, after = time.perf_counter() - begun, told(client)
    assert total == args.requests * args.output, total
    means = {name: (after[name][0] - before[name][0]) / max(1, after[name][1] - before[name][1]) for name in TIMES}
    handed = after["hand-off"][1] - before["hand-off"][1]
    rate = total / took_s
    print(f"prefill tp {args.tp}, decode dp {args.dp}, {args.layers} layers, {args.experts} experts; ready after {start_s:.1f} s")
    print(f"{args.requests} requests at once, {args.input} in, {args.output} out: {took_s:.1f} s, {handed:.0f} hand-offs")
    print(f"  {rate / (args.tp + args.dp):,.0f} output tokens/s on each GPU, {rate / args.dp:,.0f} on each that decodes")
    print("  means: " + ", ".join(f"{name} {1e3 * seconds:,.1f} ms" for name, seconds in means.items()))
    if args.json:
        figures = {"took_s": took_s, "start_s": start_s, "output_tokens_per_s": rate, "hand_offs": handed, "mean_s": means}
        args.json.write_text(json.dumps({**figures, "args": {**vars(args), "json": None}}, indent=1))


if __name__ == "__main__":
    main()
