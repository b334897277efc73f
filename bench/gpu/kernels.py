"""Each op of a V3 decode step at batch 128, and some at less, beside the least time the card could take for it, on one GPU.

    PYTHONPATH=. python bench/gpu/kernels.py [--only WORD] [--json FILE]

The floor of an op is the largest of: its bytes over the measured copy rate, its operations over the measured matrix rate, and the time
of one empty node of a graph. Times are medians over replays of a graph that holds several calls, each on inputs of its own, so that
neither launch gaps nor the L2 cache enter. "provider" says who does the work; ours are Triton kernels.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import torch
from rich.console import Console
from rich.table import Table

from hw.api import Activation, ExpertMode, ExpertStep, GateRule, PenaltyInputs, Replicas, SampleInputs, Segments
from hw.cuda.rules import ABSORB, DECODE, LINEAR, MASKED, TRITON, UNABSORB, Absorb
from hw.quant import QuantTensor
from hw.rules import Decode, Product, choose
from hw.select import open_backend

COPY_RATE = 4.27e12  # bytes/s, read and written
BF16_RATE, FP8_RATE, FP32_RATE = (
    790e12,
    1290e12,
    60e12,
)  # operations/s: the best that these libraries reached on this card; fp32 by datasheet
BATCH, CONTEXT, HIDDEN, VOCAB, HEADS = 128, 4096, 7168, 129_280, 128
LINEARS = ((2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (36864, 7168), (7168, 18432))
LITE_LINEARS = ((3648, 2048), (2048, 2048), (5632, 2048), (2048, 2816))  # V2-Lite's, in bf16
L2_BYTES = 60 << 20
BF16 = torch.bfloat16
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Job:
    """One op: `make()` draws inputs and returns a call on them."""

    name: str
    provider: str
    num_bytes: float
    num_flops: float
    rate: float
    make: Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class Row:
    name: str
    provider: str
    microseconds: float
    floor: float

    @property
    def ratio(self) -> float:
        return self.microseconds / self.floor


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def fp8(*shape: int) -> QuantTensor:
    """A random weight at the scale of a real one."""
    scale = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), device=DEVICE) * shape[-1] ** -0.5 / 100
    return QuantTensor((normal(*shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn), scale)


def time_of(job: Job) -> float:
    """Microseconds of one call."""
    num_sets = max(1, min(8, round(3 * L2_BYTES / max(job.num_bytes, 1))))
    calls = [job.make() for _ in range(num_sets)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    repeats = max(1, 8 // num_sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for i in range(13):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e3 / (repeats * num_sets))
    return statistics.median(times)


def on(op: Callable, *makers: Callable[[], object]) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        args = [maker() for maker in makers]
        return lambda: op(*args)

    return make


def fixed(value: object) -> Callable[[], object]:
    return lambda: value


def row_jobs(ops) -> Iterator[Job]:
    small = BATCH * HIDDEN * 2
    norm = normal(HIDDEN)

    x = lambda: normal(BATCH, HIDDEN)  # noqa: E731
    yield Job("rms_norm 7168", "ours", 2 * small, 0, BF16_RATE, on(ops.rms_norm, x, fixed(norm), fixed(1e-6)))
    yield Job(
        "add_rms_norm 7168, quantised",
        "ours",
        7 * small // 2,
        0,
        BF16_RATE,
        on(ops.add_rms_norm, x, x, fixed(norm), fixed(1e-6), fixed(False), fixed(True)),
    )
    part = lambda: normal(BATCH, 2112)[:, :1536]  # noqa: E731
    yield Job("rms_norm 1536 of 2112", "ours", 4 * BATCH * 1536, 0, BF16_RATE, on(ops.rms_norm, part, fixed(norm[:1536]), fixed(1e-6)))
    positions, table = torch.arange(BATCH, device=DEVICE) + CONTEXT, torch.rand(2 * CONTEXT, 64, device=DEVICE)
    q = lambda: normal(BATCH, HEADS, 192)[..., 128:]  # noqa: E731
    yield Job("rope 128 heads", "ours", 4 * BATCH * HEADS * 64, 0, BF16_RATE, on(ops.rope, q, fixed(positions), fixed(table)))
    cache, slots = normal(BATCH, 64, 576), torch.randperm(BATCH * 64, device=DEVICE)[:BATCH]
    args = [fixed(value) for value in (norm[:512], 1e-6, positions, table, cache, slots)]
    down = lambda: normal(BATCH, 2112)  # noqa: E731
    yield Job(
        "latent_write",
        "ours",
        BATCH * (5 * 576 + 3 * 1536),
        0,
        BF16_RATE,
        on(ops.latent_write, down, fixed(norm[:1536]), *args, fixed(True)),
    )
    full = torch.full((8,), BATCH, dtype=torch.int32, device=DEVICE)
    yield Job(
        "silu_mul 2 x 2048, 8 x 128 rows, quantised",
        "ours",
        5 * 1024 * 2048,
        0,
        BF16_RATE,
        on(ops.silu_mul, lambda: normal(8, BATCH, 4096), fixed(True), fixed(full)),
    )
    yield Job(
        "silu_mul 2 x 18432, quantised",
        "ours",
        5 * BATCH * 18432,
        0,
        BF16_RATE,
        on(ops.silu_mul, lambda: normal(BATCH, 36864), fixed(True)),
    )
    rule = GateRule(8, "sigmoid", 8, 4, "top2_sum", True, 2.5)
    logits = lambda: torch.randn(BATCH, 256, device=DEVICE)  # noqa: E731
    bias = torch.randn(256, device=DEVICE)
    copies = Replicas(torch.arange(256, device=DEVICE)[:, None], torch.ones(256, dtype=torch.int64, device=DEVICE))
    yield Job(
        "gate_topk 256",
        "ours",
        BATCH * (256 * 4 + 8 * 12),
        0,
        BF16_RATE,
        on(ops.gate_topk, logits, fixed(bias), fixed(rule), fixed(copies)),
    )


def linear_job(ops, num_rows: int, outer: int, inner: int, dtype: str = "fp8") -> Job:
    is_fp8 = dtype == "fp8"

    def make():
        x, w = ops.silu_mul(normal(num_rows, 2 * inner), is_fp8), fp8(outer, inner) if is_fp8 else normal(outer, inner)
        return lambda: ops.linear(x, w)

    num_bytes = (outer * inner + num_rows * inner) * (1 if is_fp8 else 2) + num_rows * 2 * outer
    provider = choose("linear", LINEAR, Product(BF16, num_rows, outer, inner, block=(128, 128) if is_fp8 else None)).served_by
    rate = FP8_RATE if is_fp8 else BF16_RATE
    return Job(f"linear {dtype} {outer} x {inner}, {num_rows} rows", provider, num_bytes, 2 * num_rows * outer * inner, rate, make)


def absorb_jobs(ops, num_rows: int) -> Iterator[Job]:
    """The products around absorbed attention, for `num_rows` tokens."""
    positions, table = torch.arange(num_rows, device=DEVICE), torch.rand(CONTEXT, 64, device=DEVICE)
    shape, flops = Absorb(BF16, num_rows), 2 * num_rows * HEADS * 128 * 512

    def query() -> Callable[[], object]:
        q, kv_up = normal(num_rows, HEADS, 192), normal(HEADS, 256, 512)
        return lambda: ops.absorb_query(q, positions, table, kv_up[:, :128])

    def output() -> Callable[[], object]:
        out, kv_up = normal(num_rows, HEADS, 512), normal(HEADS, 256, 512)
        return lambda: ops.unabsorb(out, kv_up[:, 128:], True)

    by, num_bytes = choose("absorb_query", ABSORB, shape).served_by, 2 * HEADS * (128 * 512 + num_rows * (192 + 576))
    yield Job(f"absorb_query 128 -> 512 + 64, {num_rows} tokens", by, num_bytes, flops, BF16_RATE, query)
    by, num_bytes = choose("unabsorb", UNABSORB, shape).served_by, HEADS * (2 * 128 * 512 + num_rows * (2 * 512 + 128))
    yield Job(f"unabsorb 512 -> 128, quantised, {num_rows} tokens", by, num_bytes, flops, BF16_RATE, output)


def product_jobs(ops) -> Iterator[Job]:
    for outer, inner in LINEARS:
        yield linear_job(ops, BATCH, outer, inner)

    def plain(name: str, outer: int, inner: int, dtype: torch.dtype, rate: float) -> Job:
        def make():
            x, w = normal(BATCH, inner, dtype=dtype), normal(outer, inner, dtype=dtype)
            return lambda: ops.linear(x, w)

        num_bytes = dtype.itemsize * (outer * inner + BATCH * (inner + outer))
        return Job(name, "cuBLAS", num_bytes, 2 * BATCH * outer * inner, rate, make)

    yield plain("head bf16 129280 x 7168", VOCAB, HIDDEN, BF16, BF16_RATE)

    for num_rows in (1, 32, 64, BATCH, 2 * BATCH):
        yield from absorb_jobs(ops, num_rows)

    def masked(num_experts: int, num_rows: int, outer: int, inner: int, kind: str, op: Callable, provider: str) -> Job:
        def make():
            x = normal(num_experts, BATCH, inner)
            w = fp8(num_experts, outer, inner) if kind == "fp8" else normal(num_experts, outer, inner)
            counts = torch.full((num_experts,), num_rows, dtype=torch.int32, device=DEVICE)
            return lambda: op(x, w, counts)

        size = 1 if kind == "fp8" else 2
        num_bytes = num_experts * (size * outer * inner + 2 * num_rows * (inner + outer))
        flops = 2 * num_experts * num_rows * outer * inner
        name = f"masked {kind} {num_experts} x {num_rows} rows, {outer} x {inner}"
        return Job(name, provider, num_bytes, flops, FP8_RATE if kind == "fp8" else BF16_RATE, make)

    ours = type(ops)(flash_mla=None, deep_gemm=None)
    for num_experts, num_rows in ((8, 128), (32, 32)):
        for outer, inner in ((4096, 7168), (7168, 2048)):
            yield masked(num_experts, num_rows, outer, inner, "fp8", ops.grouped_linear_masked, "DeepGEMM + ours")
    for outer, inner in ((4096, 7168), (7168, 2048)):
        yield masked(8, 128, outer, inner, "bf16", ops.grouped_linear_masked, "DeepGEMM")
        yield masked(8, 128, outer, inner, "bf16", ours.grouped_linear_masked, "ours")


def small_jobs(ops) -> Iterator[Job]:
    """Steps of fewer tokens: what reads weights, and attention of few sequences."""
    for num_rows in (1, 8, 16, 64):
        for outer, inner in LINEARS:
            yield linear_job(ops, num_rows, outer, inner)
    for num_rows in (1, 8, 64):
        for outer, inner in LITE_LINEARS:
            yield linear_job(ops, num_rows, outer, inner, "bf16")
    for outer, inner in ((256, HIDDEN), (64, 2048)):
        for num_rows in (1, 8, 16, 64, 128):

            def make(num_rows=num_rows, outer=outer, inner=inner):
                x, w = normal(num_rows, inner), normal(outer, inner, dtype=torch.float32)
                return lambda: ops.gate_logits(x, w)

            num_bytes, flops = 4 * outer * inner + num_rows * (2 * inner + 4 * outer), 2 * num_rows * outer * inner
            yield Job(f"gate_logits {outer} x {inner}, {num_rows} rows", TRITON, num_bytes, flops, FP32_RATE, make)

    def masked(kind: str, num_experts: int, top_k: int, num_rows: int, outer: int, inner: int) -> Job:
        """Each of `num_rows` tokens goes to `top_k` experts, drawn at random."""
        drawn = torch.rand(num_rows, num_experts, device=DEVICE).argsort(-1)[:, :top_k].flatten()
        counts = torch.bincount(drawn, minlength=num_experts).int()

        def make():
            x = ops.silu_mul(normal(num_experts, num_rows, 2 * inner), kind == "fp8", counts)
            w = fp8(num_experts, outer, inner) if kind == "fp8" else normal(num_experts, outer, inner)
            return lambda: ops.grouped_linear_masked(x, w, counts)

        size, used = 1 if kind == "fp8" else 2, int((counts > 0).sum())
        num_bytes = size * used * outer * inner + num_rows * top_k * (size * inner + 2 * outer)
        shape = Product(BF16, num_rows, outer, inner, num_experts, (128, 128) if kind == "fp8" else None)
        name = f"masked {kind} {num_experts} experts of {outer} x {inner}, {num_rows} tokens"
        return Job(name, choose("masked", MASKED, shape).served_by, num_bytes, 2 * num_rows * top_k * outer * inner, BF16_RATE, make)

    for outer, inner in ((4096, 7168), (7168, 2048)):
        for num_rows in (1, 8, 16):
            yield masked("fp8", 8, 8, num_rows, outer, inner)
    for outer, inner in ((2816, 2048), (2048, 1408)):  # V2-Lite
        for num_rows in (1, 16, 64, 256):
            yield masked("bf16", 64, 6, num_rows, outer, inner)


def few_sequences_jobs(ops) -> Iterator[Job]:
    for num_seqs, num_heads, context in ((1, 128, 4096), (8, 128, 4096), (1, 16, 1024), (8, 16, 1024), (64, 16, 1024)):
        lens = torch.full((num_seqs,), context, dtype=torch.int32, device=DEVICE)

        def make(num_seqs=num_seqs, num_heads=num_heads, context=context, lens=lens):
            cache = normal(num_seqs * context // 64, 64, 576)
            table = torch.randperm(cache.shape[0], device=DEVICE).int().view(num_seqs, -1)
            q, plan = normal(num_seqs, 1, num_heads, 576), ops.decode_plan()
            return lambda: ops.mla_decode(q, cache, table, lens, context, 512, 576**-0.5, plan)

        num_bytes = 2 * num_seqs * (context * 576 + num_heads * (576 + 512))
        provider = choose("mla_decode", DECODE, Decode(BF16, num_seqs, 1, num_heads, 512, 64, 64, context)).served_by
        name = f"mla_decode {num_seqs} x {context}, {num_heads} heads"
        yield Job(name, provider, num_bytes, 2 * num_seqs * num_heads * context * 1088, BF16_RATE, make)


def attention_jobs(ops) -> Iterator[Job]:
    ours = type(ops)(flash_mla=None, deep_gemm=None)
    num_pages = BATCH * CONTEXT // 64
    cache = normal(num_pages, 64, 576)
    table = torch.randperm(num_pages, device=DEVICE).int().view(BATCH, -1)
    lens = torch.full((BATCH,), CONTEXT, dtype=torch.int32, device=DEVICE)

    def decode(num_heads: int, who, provider: str) -> Job:
        def make():
            q = normal(BATCH, 1, num_heads, 576)
            return lambda: who.mla_decode(q, cache, table, lens, CONTEXT, 512, 576**-0.5)

        num_bytes = 2 * BATCH * (CONTEXT * 576 + num_heads * (576 + 512))
        return Job(f"mla_decode {num_heads} heads, 4096", provider, num_bytes, 2 * BATCH * num_heads * CONTEXT * 1088, BF16_RATE, make)

    for num_heads in (128, 16):
        yield decode(num_heads, ops, "FlashMLA")
        yield decode(num_heads, ours, "ours")

    def prefill(num_seqs: int) -> Job:
        def make():
            q, k, v = (normal(num_seqs * CONTEXT, HEADS, width) for width in (192, 192, 128))
            segments = Segments([CONTEXT] * num_seqs, (torch.arange(num_seqs + 1, device=DEVICE) * CONTEXT).int())
            return lambda: ops.mla_prefill(q, k, v, segments, segments, 192**-0.5, True)

        num_bytes, flops = 2 * num_seqs * CONTEXT * HEADS * 640, num_seqs * HEADS * CONTEXT * CONTEXT * 320
        return Job(f"mla_prefill {num_seqs} x 4096 tokens, 128 heads", "ours", num_bytes, flops, BF16_RATE, make)

    yield prefill(1)
    yield prefill(4)


def other_jobs(ops, comm) -> Iterator[Job]:
    step = ExpertStep(ExpertMode.LOW_LATENCY, BATCH)
    weights = torch.rand(BATCH, 8, device=DEVICE)

    def sent() -> tuple[Activation, torch.Tensor]:
        forms, _ = ops.add_rms_norm(normal(BATCH, HIDDEN), normal(BATCH, HIDDEN), normal(HIDDEN), 1e-6, False, True)
        return forms, torch.rand(BATCH, 8, device=DEVICE).argsort(-1)

    def dispatch():
        x, topk = sent()
        return lambda: comm.dispatch(x, topk, weights, step, 8)

    def combine():
        x, topk = sent()
        dispatched, y, shared = comm.dispatch(x, topk, weights, step, 8), normal(8, BATCH, HIDDEN), normal(BATCH, HIDDEN)
        return lambda: comm.combine(y, weights, dispatched, shared)

    row = HIDDEN + HIDDEN // 128 * 4  # bytes of a quantised one
    yield Job("dispatch 8 of 8 experts, local, fp8", "ours", 9 * BATCH * row, 0, BF16_RATE, dispatch)
    yield Job("combine 8 of 8 experts and shared, local", "ours", 2 * BATCH * HIDDEN * (8 + 1 + 1), 0, BF16_RATE, combine)
    num_bytes = BATCH * VOCAB * 4
    none, ones = torch.zeros(BATCH, dtype=torch.int64, device=DEVICE), torch.ones(BATCH, device=DEVICE)
    keys = (torch.arange(BATCH, device=DEVICE), none, none + CONTEXT)

    def sample(sampled: bool, top_k: int, top_p: float) -> Callable[[], Callable[[], object]]:
        def make():
            logits = torch.randn(BATCH, VOCAB, device=DEVICE) * 3
            inputs = SampleInputs(ones * sampled, none + top_k, ones * top_p, 0 * ones, *keys, sampled, top_k > 0 or top_p < 1)
            return lambda: ops.sample(logits, inputs)

        return make

    yield Job("sample greedy", "ours", num_bytes, 0, BF16_RATE, sample(False, 0, 1.0))
    yield Job("sample plain", "ours", num_bytes, 0, BF16_RATE, sample(True, 0, 1.0))
    yield Job("sample top-k 50, top-p 0.9", "ours", num_bytes, 0, BF16_RATE, sample(True, 50, 0.9))
    yield Job("sample top-p 0.9", "ours", num_bytes, 0, BF16_RATE, sample(True, 0, 0.9))

    def logprobs():
        logits = torch.randn(BATCH, VOCAB, device=DEVICE)
        return lambda: ops.logprobs(logits, none, 5)

    yield Job("logprobs, 5 best", "ours", num_bytes, 0, BF16_RATE, logprobs)

    def penalize():
        logits = torch.randn(BATCH, VOCAB, device=DEVICE)
        mask, counts = torch.rand(BATCH, VOCAB, device=DEVICE) < 0.1, torch.zeros(BATCH, VOCAB, device=DEVICE)
        inputs = PenaltyInputs(none + torch.arange(BATCH, device=DEVICE), mask, counts, ones, ones, ones * 1.1)
        return lambda: ops.penalize(logits, inputs)

    yield Job("penalize 128 rows", "ours", BATCH * VOCAB * 13, 0, BF16_RATE, penalize)


def empty_node() -> float:
    """Microseconds of a graph node that does next to nothing."""
    x = torch.zeros(1, device=DEVICE)
    return time_of(Job("empty", "torch", 1e9, 0, 1.0, lambda: lambda: x.add_(1.0)))


def card() -> dict[str, str]:
    found = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    modules = {name: str(getattr(sys.modules[name], "__version__", "?")) for name in ("triton", "deep_gemm", "flash_mla")}
    return {"gpu": found.stdout.strip(), "torch": torch.__version__, "python": platform.python_version(), **modules}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="jobs whose name holds this")
    parser.add_argument("--json", help="where to write the numbers")
    options = parser.parse_args()
    backend = open_backend("cuda", max_dispatch_tokens_per_rank=BATCH)
    torch.manual_seed(0)
    node = empty_node()
    rows: list[Row] = []
    for jobs in (
        row_jobs(backend.ops),
        product_jobs(backend.ops),
        small_jobs(backend.ops),
        few_sequences_jobs(backend.ops),
        attention_jobs(backend.ops),
        other_jobs(backend.ops, backend.expert_comm),
    ):
        for job in jobs:
            if options.only in job.name:
                floor = max(node, job.num_bytes / COPY_RATE * 1e6, job.num_flops / job.rate * 1e6)
                rows.append(Row(job.name, job.provider, time_of(job), floor))
                print(f"{rows[-1].name}: {rows[-1].microseconds:.1f} us", file=sys.stderr, flush=True)
                torch.cuda.empty_cache()
    facts = card() | {"date": datetime.now(UTC).date().isoformat(), "command": " ".join(sys.argv), "empty node us": f"{node:.2f}"}
    table = Table("op", "by", "us", "floor us", "over floor", title=", ".join(f"{key} {value}" for key, value in facts.items()))
    for row in rows:
        table.add_row(row.name, row.provider, f"{row.microseconds:.1f}", f"{row.floor:.1f}", f"{row.ratio:.2f}")
    Console(width=120).print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"facts": facts, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}, file, indent=1)


if __name__ == "__main__":
    main()
