"""Compiles what a model's products need before they are needed, in several processes.

DeepGEMM compiles a kernel when it first meets a shape, seconds each, and holds the interpreter while it does. So each product is run
once at every row count that may change the choice of kernel, by worker processes that share the cache folder:

    this process   -- a line for some row counts of a product -->   python -m hw.cuda.warm_up   (several)
                   <-- a line when they have run --
"""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from hw.api import ExpertRows, Ops
from hw.cuda.kernel_cache import KernelCache
from hw.cuda.layout import ALIGN_ROWS, masked_rows, quantized_masked_rows, quantized_rows
from hw.cuda.rules import DEEP_GEMM, GROUPED, LINEAR, MASKED
from hw.quant import QuantTensor, scale_shape
from hw.rules import ModelShapes, Product, choose

logger = logging.getLogger(__name__)

WORKER_BYTES = 3 << 30  # of the GPU: context, the largest weight, its rows
MAX_WORKERS = 32
_TILE_ROWS = 64  # DeepGEMM's tiles of more than 32 rows hold multiples of this many
# Beyond this, kernels come again that fewer rows had before: for V3's products the last new one came at 3,392 rows.
_MOST_ROWS = 4096
# Small steps have the most kernels; the row counts up to each of these are one worker's at a time.
_CHUNKS = (128, 512, 1024, 2048, _MOST_ROWS)


def wanted(shapes: ModelShapes) -> dict[str, set[int]]:
    """Row counts at which each product must have run once. A product's name says its kind, dtype and shape, in JSON."""
    found = {}
    for weight in shapes.products.values():
        experts = len(weight.shape) == 3
        kinds = {"linear": (LINEAR, tile_rows(shapes.max_rows))}
        if experts:
            most = min(_MOST_ROWS, shapes.max_rows * shapes.top_k + weight.shape[0] * (ALIGN_ROWS - 1))
            kinds = {
                "grouped": (GROUPED, set(range(ALIGN_ROWS, most + 1, ALIGN_ROWS))),
                "masked": (MASKED, tile_rows(shapes.max_low_latency_rows)),
            }
        for kind, (table, row_counts) in kinds.items():
            block = list(weight.block) if isinstance(weight, QuantTensor) else None
            name = json.dumps([kind, str(shapes.dtype).removeprefix("torch."), list(weight.shape), block])
            # Others bring their kernels along, or compile few of them and fast.
            found[name] = {
                rows for rows in row_counts if choose(kind, table, Product.of(rows, shapes.dtype, weight)).served_by == DEEP_GEMM
            }
    return {name: row_counts for name, row_counts in found.items() if row_counts}


def tile_rows(most: int) -> set[int]:
    """Between two of these row counts no choice of DeepGEMM's changes: it counts tiles of 16, 32 and multiples of 64 rows."""
    return {16, 32} | {rows + _TILE_ROWS for rows in range(0, min(most, _MOST_ROWS), _TILE_ROWS)}


def warm_up(shapes: ModelShapes, cache: KernelCache, progress: bool | None) -> None:
    """Compile what the cache lacks. What cannot be compiled ahead is left to its first use, with a warning."""
    with cache.locked():
        chunks = _chunks(cache.lacking(wanted(shapes)))
        if not chunks:
            return
        free, _ = torch.cuda.mem_get_info()
        num_workers = max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)), len(chunks), free // WORKER_BYTES))
        with _progress_bar(len(chunks), progress) as advance:
            done = _run(chunks, num_workers, advance)
        compiled: dict[str, set[int]] = defaultdict(set)
        for name, row_counts in done:
            compiled[name].update(row_counts)
        cache.note(compiled)
    if failed := len(chunks) - len(done):
        logger.warning("%d of %d groups of products could not be compiled ahead; they compile at first use", failed, len(chunks))


def _chunks(lacking: dict[str, set[int]]) -> list[tuple[str, list[int]]]:
    """Row counts of one product that one worker runs one after the other; neighbours share kernels. Small steps come first."""
    chunks = []
    for low, high in zip((0, *_CHUNKS), _CHUNKS, strict=False):
        for name, row_counts in lacking.items():
            if inside := sorted(rows for rows in row_counts if low < rows <= high):
                chunks.append((name, inside))
    return chunks


def _run(chunks: list[tuple[str, list[int]]], num_workers: int, advance: Callable[[], None]) -> list[tuple[str, list[int]]]:
    """Give each worker a chunk as soon as it is done with the one before. Returns the chunks that succeeded."""
    waiting: queue.SimpleQueue[tuple[str, list[int]]] = queue.SimpleQueue()
    for chunk in chunks:
        waiting.put(chunk)
    done: list[tuple[str, list[int]]] = []

    def feed(worker: subprocess.Popen) -> None:
        assert worker.stdin is not None and worker.stdout is not None
        try:
            while True:
                chunk = waiting.get_nowait()
                worker.stdin.write(json.dumps(chunk) + "\n")
                worker.stdin.flush()
                reply = worker.stdout.readline()
                if not reply:
                    return  # it died; its last words are on stderr
                if (problem := json.loads(reply)) is None:
                    done.append(chunk)
                else:
                    logger.warning("%s with %s rows: %s", *chunk, problem)
                advance()
        except (queue.Empty, BrokenPipeError):
            return

    command = [sys.executable, "-m", "hw.cuda.warm_up", str(torch.cuda.current_device())]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(num_workers)]
    try:
        threads = [threading.Thread(target=feed, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return done


@contextmanager
def _progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[], None]]:
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def main() -> None:
    """A worker: runs what stdin asks for, a line each; answers null, or what went wrong."""
    import deep_gemm

    from hw.cuda.ops import CudaOps

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers write to stdout
    torch.cuda.set_device(int(sys.argv[1]))
    ops = CudaOps(flash_mla=None, deep_gemm=deep_gemm)
    for line in sys.stdin:
        problem = None
        try:
            run_product(ops, *json.loads(line), torch.device("cuda"))
        except Exception as error:  # whatever it is, others may compile
            problem = f"{type(error).__name__}: {error}"
        replies.write(json.dumps(problem) + "\n")
        replies.flush()


def run_product(ops: Ops, name: str, row_counts: list[int], device: torch.device) -> None:
    """Run one product of `wanted` on rows of nothing, at each of these row counts."""
    kind, dtype_name, shape, block = json.loads(name)
    dtype, (*experts, _outer, inner) = getattr(torch, dtype_name), shape
    weight: torch.Tensor | QuantTensor
    if block is None:
        weight = torch.zeros(shape, dtype=dtype, device=device)
    else:
        data = torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        weight = QuantTensor(data, torch.ones(scale_shape(tuple(shape), tuple(block)), device=device), block=tuple(block))
    quant = ops.quantizes(weight, dtype)
    for rows in row_counts:
        if kind == "masked":
            make = quantized_masked_rows if quant else partial(masked_rows, dtype=dtype)
            counts = torch.zeros(experts, dtype=torch.int32, device=device)
            ops.grouped_linear_masked(make(*experts, rows, inner, device=device), weight, counts)
            continue
        x = quantized_rows(rows, inner, device) if quant else torch.zeros(rows, inner, dtype=dtype, device=device)
        if kind == "linear":
            ops.linear(x, weight)
        else:  # rows of no expert cost nothing
            nobodys = torch.full((rows,), -1, dtype=torch.int32, device=device)
            ops.grouped_linear(x, weight, ExpertRows([rows] + [0] * (experts[0] - 1), ALIGN_ROWS, nobodys))
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
