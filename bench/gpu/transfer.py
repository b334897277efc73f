"""Moving pages from one process's device memory to another's over NIXL: bytes per second, pages in a row and scattered.

    python bench/gpu/transfer.py [--devices cuda:0 cuda:1] [--regions 61] [--pages 1 16 64 256] [--repeats 5] [--json FILE]

The shapes are DeepSeek-V3's: 61 layers, pages of 64 tokens of 576 bf16 values. A write of n pages is n pages of every layer: the same
numbers in a row on both sides, or any on both. Its time runs from the call until it is settled; what has arrived is compared with what
was sent. One device for both works too.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from hw.nixl_transfer import NixlTransfer
from hw.transfer import Part

WAIT_S = 60.0
PAGE = (64, 576)
ORDERS = ("in a row", "scattered")


def receive(pipe: Any, device: str, num_pages: int, num_regions: int) -> None:
    """The other process: tells when a part is announced, and sums of the pages that it is asked about."""
    caches = [torch.zeros(num_pages, *PAGE, dtype=torch.bfloat16, device=device) for _ in range(num_regions)]
    transfer = NixlTransfer("receiver", caches)
    pipe.send(transfer.describe())
    while (pages := pipe.recv()) is not None:
        deadline_s = time.monotonic() + WAIT_S
        while not transfer.poll() and time.monotonic() < deadline_s:
            continue
        pipe.send([sums_of(cache, pages) for cache in caches])
        for cache in caches:
            cache.zero_()
        float(caches[-1][0, 0, 0])  # waits for the device
        pipe.send("ready")
    transfer.close()


def sums_of(cache: torch.Tensor, pages: list[int]) -> list[float]:
    """Of each page's values, exact in double precision."""
    return cache[pages].double().sum((1, 2)).tolist()


def measure(order: str, num_pages: int, repeats: int, transfer: NixlTransfer, peer: str, caches: list[torch.Tensor], pipe: Any) -> dict:
    """One transfer of `num_pages` pages of every region; the median of `repeats`."""
    most = len(caches[0])
    times_ms = []
    for repeat in range(repeats + 1):
        pages, peer_pages = list(range(num_pages)), list(range(num_pages))
        if order == "scattered":
            pages, peer_pages = (torch.randperm(most)[:num_pages].tolist() for _ in range(2))
        pipe.send(peer_pages)
        started_s = time.perf_counter()
        part = Part(f"{order} {num_pages}", repeat, 0, 0, True)
        write = transfer.write(peer, part, range(len(caches)), pages, peer_pages, time.monotonic() + WAIT_S)
        while not write.settled:
            transfer.poll()
        times_ms.append((time.perf_counter() - started_s) * 1e3)
        while not pipe.poll(0):
            transfer.poll()
        if pipe.recv() != [sums_of(cache, pages) for cache in caches]:
            raise SystemExit(f"{num_pages} pages, {order}: what has arrived is not what was sent")
        pipe.recv()
    num_bytes = num_pages * len(caches) * PAGE[0] * PAGE[1] * 2
    median_ms = statistics.median(times_ms[1:])  # the first one makes connections
    return {"order": order, "pages": num_pages, "bytes": num_bytes, "ms": median_ms, "GB_s": num_bytes / median_ms / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--regions", type=int, default=61)
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    torch.manual_seed(0)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    other = context.Process(target=receive, args=(theirs, args.devices[1], max(args.pages), args.regions), daemon=True)
    other.start()
    shape = (max(args.pages), *PAGE)
    caches = [torch.randint(-8, 9, shape, device=args.devices[0]).to(torch.bfloat16) for _ in range(args.regions)]
    float(caches[-1][0, 0, 0])  # waits for the device: what is written must be there
    transfer = NixlTransfer("sender", caches)
    peer = transfer.connect(pipe.recv())
    name = "CPU" if args.devices[0] == "cpu" else torch.cuda.get_device_name(args.devices[0])
    print(f"{name}, {args.devices[0]} to {args.devices[1]}, {args.regions} regions, medians of {args.repeats}")
    print(f"{'':12}{'pages':>8}{'MB':>10}{'ms':>10}{'GB/s':>8}")
    rows = []
    for order in ORDERS:
        for num_pages in args.pages:
            row = measure(order, num_pages, args.repeats, transfer, peer, caches, pipe)
            rows.append(row)
            print(f"{order:12}{num_pages:>8}{row['bytes'] / 1e6:>10.1f}{row['ms']:>10.2f}{row['GB_s']:>8.1f}", flush=True)
    pipe.send(None)
    other.join()
    transfer.close()
    if args.json:
        args.json.write_text(json.dumps({"devices": args.devices, "name": name, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
