"""Moving pages between two processes of this machine over NIXL: bytes per second beside a memory copy and a plain TCP socket.

    python bench/transfer_cpu.py [--regions 61] [--page-bytes 73728] [--pages 1 8 32] [--repeats 9] [--transport shared tcp] [--json FILE]

The defaults are DeepSeek-V3's: 61 layers, pages of 64 tokens of 576 bf16 values. A write of n pages is n pages of every layer, to other
page numbers in random order. Its time runs from the call until the receiver has its announcement. All that arrives is compared.
`shared` lets UCX choose among what the machine has, `tcp` holds it to TCP, which is what another host would see of it.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import socket
import statistics
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hw.nixl_transfer import NixlTransfer
from hw.transfer import Part

WAIT_S = 120.0
POLL_S = 1e-4  # two processes that spin would take the cores from those that copy
MOST_BYTES = 1 << 30  # of a cache, for there are several


def make_cache(args: argparse.Namespace) -> list[torch.Tensor]:
    return [torch.zeros(max(args.pages), args.page_bytes, dtype=torch.uint8) for _ in range(args.regions)]


def use(transport: str) -> None:
    if transport == "tcp":
        os.environ["UCX_TLS"] = "tcp"


def receive(pipe: Any, transport: str, args: argparse.Namespace) -> None:
    """The other process: tells when a part is announced, and a digest of each page that it is asked about."""
    use(transport)
    caches = make_cache(args)
    transfer = NixlTransfer("receiver", caches)
    pipe.send(transfer.describe())
    torch.set_num_threads(1)
    while (request := pipe.recv()) is not None:
        deadline_s = time.monotonic() + WAIT_S
        while not transfer.poll() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        pipe.send(time.monotonic())
        pipe.send([zlib.crc32(cache[page].numpy()) for cache in caches for page in request])
    before_s = time.process_time()
    time.sleep(1.0)
    pipe.send(time.process_time() - before_s)


def send(pipe: Any, transport: str, args: argparse.Namespace) -> None:
    """Puts the figures of one transport."""
    use(transport)
    context = multiprocessing.get_context("spawn")
    theirs_pipe, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs, transport, args), daemon=False)
    receiver.start()
    caches = make_cache(args)
    for cache in caches:
        cache.numpy()[:] = np.frombuffer(np.random.bytes(cache.numel()), np.uint8).reshape(cache.shape)
    transfer = NixlTransfer("sender", caches)
    peer = transfer.connect(theirs_pipe.recv())
    rows = []
    for num_pages in args.pages:
        times_s = [time_write(transfer, peer, caches, num_pages, theirs_pipe) for _ in range(args.repeats + 1)][1:]
        rows.append({"transport": f"nixl {transport}", "pages": num_pages, "seconds": statistics.median(times_s)})
    theirs_pipe.send(None)
    pipe.send((rows, theirs_pipe.recv()))
    receiver.join()


def time_write(transfer: NixlTransfer, peer: str, caches: list[torch.Tensor], num_pages: int, pipe: Any) -> float:
    pages, targets = (random.sample(range(len(caches[0])), num_pages) for _ in range(2))
    pipe.send(targets)
    start_s = time.monotonic()
    write = transfer.write(peer, Part("bench", 1, 0, 0, True), range(len(caches)), pages, targets, start_s + WAIT_S)
    while not write.settled:
        transfer.poll()
        time.sleep(POLL_S)
    took_s = pipe.recv() - start_s  # one clock for all processes of a machine
    expected = [zlib.crc32(cache[page].numpy()) for cache in caches for page in pages]
    if pipe.recv() != expected:
        raise SystemExit(f"{num_pages} pages did not arrive as they were sent ({write.state})")
    return took_s


def time_copy(num_bytes: int, repeats: int) -> float:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    return statistics.median(timed(lambda: target.copy_(source), repeats))


def time_socket(num_bytes: int, repeats: int) -> float:
    """Through a loopback connection into one buffer, sender and receiver as threads that leave the interpreter lock while they wait."""
    source, target = bytearray(num_bytes), memoryview(bytearray(num_bytes))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()

        def once() -> None:
            sender = threading.Thread(target=ours.sendall, args=(source,))
            sender.start()
            num_read = 0
            while num_read < num_bytes:
                num_read += theirs.recv_into(target[num_read:])
            sender.join()

        with theirs:
            return statistics.median(timed(once, repeats))


def timed(work: Any, repeats: int) -> list[float]:
    times_s = []
    for _ in range(repeats + 1):
        start_s = time.monotonic()
        work()
        times_s.append(time.monotonic() - start_s)
    return times_s[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regions", type=int, default=61)
    parser.add_argument("--page-bytes", type=int, default=64 * 576 * 2)
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--transport", nargs="+", choices=["shared", "tcp"], default=["shared", "tcp"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if max(args.pages) * args.regions * args.page_bytes > MOST_BYTES:
        parser.error(f"{max(args.pages)} pages of {args.regions} regions of {args.page_bytes} bytes are more than {MOST_BYTES} bytes")
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows, idle = [], {}
    for transport in args.transport:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=send, args=(theirs, transport, args))
        process.start()
        theirs.close()
        figures, idle[transport] = ours.recv()
        rows += figures
        process.join()
    for num_pages in args.pages:
        num_bytes = num_pages * args.regions * args.page_bytes
        rows.append({"transport": "memory copy", "pages": num_pages, "seconds": time_copy(num_bytes, args.repeats)})
        rows.append({"transport": "plain socket", "pages": num_pages, "seconds": time_socket(num_bytes, args.repeats)})
    print(f"{platform.machine()}, {os.cpu_count()} cores, load average {load:.1f} at the start, medians of {args.repeats}")
    print(f"{'':<16}{'pages':>6}{'MB':>10}{'ms':>10}{'GB/s':>8}")
    for row in rows:
        num_bytes, milliseconds = row["pages"] * args.regions * args.page_bytes, row["seconds"] * 1e3
        print(f"{row['transport']:<16}{row['pages']:>6}{num_bytes / 1e6:>10.2f}{milliseconds:>10.2f}{num_bytes / milliseconds / 1e6:>8.2f}")
    for transport, cores in idle.items():
        print(f"NIXL's progress thread of an idle process, {transport}: {cores:.2f} of a core")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "idle_cores": idle}, indent=1))


if __name__ == "__main__":
    main()
