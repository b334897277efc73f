"""What the frontend relays: many concurrent streams from an engine that answers at once.

    python bench/server.py [--streams 256] [--tokens 400] [--step-ms 0 10 20] [--json FILE] [--no-profile]

Three processes: the real frontend, an engine that computes nothing and speaks the real protocol, and this one with raw HTTP clients.
A step gives every stream one token. `step 0 ms` is an engine without bounds: outputs that the frontend has not relayed yet are merged,
so an event then carries several tokens. CPU time is the frontend's alone; it says more than the wall clock where cores are shared.
The profile comes from a run of its own, for profiling slows every call down.
"""

import argparse
import asyncio
import cProfile
import json
import os
import platform
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
import uvloop
import zmq

import deepserve
from deepserve.engine.request import SequenceOutput
from deepserve.messages import PROTOCOL_VERSION, Abort, Drain, Heartbeat, Load, Outputs, Register, Stop, Submit, ToEngine
from deepserve.server.lifecycle import Frontend
from deepserve.server.state import ServerOptions

MODEL = Path(deepserve.__file__).parent / "models" / "deepserve-tiny"
TOKENS = range(300, 400)  # ordinary text
ROUTES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    "completions": ("/v1/completions", {"prompt": "Hi"}),
}


# -- the engine's process --


def run_engine(address: str, step_ms: float):
    """All running requests step together, every `step_ms` milliseconds or as fast as the socket takes it."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToEngine)
    register = Register(PROTOCOL_VERSION, "bench", "unified", 0, "bench", 0, 4096, 4096, 4096, 64, 1 << 20, os.getpid())
    socket.send(encoder.encode(register))
    running: dict[str, list[int]] = {}  # request -> tokens given, tokens wanted
    next_beat_s = next_step_s = time.perf_counter()
    while True:
        now_s = time.perf_counter()
        if now_s >= next_beat_s:
            socket.send(encoder.encode(Heartbeat("bench", 0, Load(num_running=len(running)))))
            next_beat_s = now_s + 1.0
        wait_s = (next_step_s if running else next_beat_s) - now_s
        while socket.poll(max(0, round(wait_s * 1000))):
            wait_s = 0
            match decoder.decode(socket.recv()):
                case Submit() as submit:
                    running[submit.request_id] = [0, submit.params.max_tokens]
                case Abort() as abort:
                    for request_id in abort.request_ids:
                        running.pop(request_id, None)
                case Drain() | Stop():
                    return
        if running and time.perf_counter() >= next_step_s:
            next_step_s = max(next_step_s + step_ms / 1000, time.perf_counter() - step_ms / 1000)
            socket.send(encoder.encode(Outputs([_output(*item) for item in running.items()], Load(num_running=len(running)))))
            for request_id in [request_id for request_id, (given, wanted) in running.items() if given == wanted]:
                del running[request_id]


def _output(request_id: str, counts: list[int]) -> SequenceOutput:
    counts[0] += 1
    token_id = TOKENS[counts[0] % len(TOKENS)]
    return SequenceOutput(request_id, 0, [token_id], finish_reason="length" if counts[0] == counts[1] else None)


# -- the frontend's process --


class EngineProcess:
    def __init__(self, step_ms: float):
        self._step_ms = step_ms
        self._process: subprocess.Popen | None = None

    def start(self, frontend_address: str):
        self._process = subprocess.Popen([sys.executable, __file__, "--role", "engine", frontend_address, str(self._step_ms)])

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self, grace_s: float):
        self._process.kill()
        self._process.wait()


def run_frontend(step_ms: float, profile_path: str):
    frontend = Frontend(ServerOptions(model_path=str(MODEL), port=0), EngineProcess(step_ms))
    if not profile_path:
        sys.exit(uvloop.run(frontend.run()))
    with cProfile.Profile() as profile:
        uvloop.run(frontend.run())
    profile.dump_stats(profile_path)


class FrontendProcess:
    """Ready when entered."""

    def __init__(self, step_ms: float, profile_path: str = ""):
        self._command = [sys.executable, __file__, "--role", "frontend", str(step_ms), profile_path]

    def __enter__(self) -> "FrontendProcess":
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if "listening on" in line:
                self.port = int(line.rsplit(":", 1)[1])
            if line.startswith("deepserve: ready"):
                return self
        raise RuntimeError("the frontend did not start")

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def __exit__(self, *_):
        self.process.terminate()
        self.process.communicate()


# -- the clients --


async def read_stream(port: int, request: bytes) -> tuple[int, float]:
    """Number of events, and seconds to the first one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start_s = time.perf_counter()
    writer.write(request)
    num_events, first_s, tail = 0, 0.0, b""
    while b"data: [DONE]" not in tail:
        data = await reader.read(1 << 16)
        if not data:
            raise RuntimeError(f"a stream was cut: {tail!r}")
        first_s = first_s or time.perf_counter() - start_s
        # A mark cut by the end of a read is counted with the next one.
        joint = tail[-5:] + data
        num_events += joint.count(b"data: ")
        tail = (tail + data)[-64:]
    writer.close()
    return num_events, first_s


async def read_all(port: int, route: str, num_streams: int, num_tokens: int) -> list[tuple[int, float]]:
    path, body = ROUTES[route]
    payload = json.dumps({**body, "stream": True, "max_tokens": num_tokens}).encode()
    request = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(payload)) + payload
    return await asyncio.gather(*[read_stream(port, request) for _ in range(num_streams)])


def measure(route: str, step_ms: float, num_streams: int, num_tokens: int) -> dict:
    with FrontendProcess(step_ms) as frontend:
        uvloop.run(read_all(frontend.port, route, num_streams, 20))  # the first requests import and allocate
        cpu_s, start_s = frontend.cpu_s(), time.perf_counter()
        streams = uvloop.run(read_all(frontend.port, route, num_streams, num_tokens))
        wall_s, cpu_s = time.perf_counter() - start_s, frontend.cpu_s() - cpu_s
    total = num_streams * num_tokens
    num_events = sum(count for count, _ in streams)
    return {
        "route": route,
        "step_ms": step_ms,
        "tokens_per_s": total / wall_s,
        "events_per_s": num_events / wall_s,
        "tokens_per_event": total / num_events,
        "cpu_us_per_token": cpu_s / total * 1e6,
        "cpu_us_per_event": cpu_s / num_events * 1e6,
        "cpu_share": cpu_s / wall_s,
        "first_token_ms_max": max(first_s for _, first_s in streams) * 1e3,
    }


def print_profile(route: str, num_streams: int, num_tokens: int, step_ms: float):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "profile")
        with FrontendProcess(step_ms, path) as frontend:
            uvloop.run(read_all(frontend.port, route, num_streams, num_tokens))
        stats = pstats.Stats(path).stats
    costs = sorted(((own_s, calls, name) for name, (_, calls, own_s, _, _) in stats.items() if "select" not in name[2]), reverse=True)
    total_s = sum(own_s for own_s, _, _ in costs)
    print(f"\nprofile of the frontend ({route}, step {step_ms:g} ms), own time of calls")
    for own_s, calls, (file, line, name) in costs[:20]:
        print(f"{own_s / total_s:6.1%} {calls:10,} calls  {Path(file).name}:{line} {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0, 10, 20])
    parser.add_argument("--routes", nargs="+", choices=list(ROUTES), default=["chat"])
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        role, *rest = args.role
        return run_engine(rest[0], float(rest[1])) if role == "engine" else run_frontend(float(rest[0]), rest[1])
    print(
        f"{args.streams} streams of {args.tokens} tokens; {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    print(
        f"{'route':12} {'step ms':>7} {'tokens/s':>9} {'events/s':>9} {'tok/event':>9} {'CPU us/token':>12} {'CPU us/event':>12} {'CPU':>5}"
    )
    rows = []
    for route in args.routes:
        for step_ms in args.step_ms:
            row = measure(route, step_ms, args.streams, args.tokens)
            rows.append(row)
            print(
                f"{route:12} {step_ms:7g} {row['tokens_per_s']:9,.0f} {row['events_per_s']:9,.0f} {row['tokens_per_event']:9.2f} "
                f"{row['cpu_us_per_token']:12.1f} {row['cpu_us_per_event']:12.1f} {row['cpu_share']:5.0%}"
            )
    if not args.no_profile:
        print_profile(args.routes[0], args.streams, args.tokens, args.step_ms[-1])
    if args.json:
        args.json.write_text(json.dumps({"streams": args.streams, "tokens": args.tokens, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
