"""What scheduling costs on the host: one step of many decoding sequences, and prefix lookup of a long cached prompt.

    python bench/scheduler.py [--num-seqs 1024] [--prompt-len 32768] [--repeats 300] [--json FILE]

Nothing is computed: results are made up, so the figures are the scheduler's and the page allocator's alone.
"""

import argparse
import json
import platform
import random
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from deepserve.config import PAGE_SIZE
from deepserve.engine.pages import Pages
from deepserve.engine.request import SamplingParams
from deepserve.engine.scheduler import Scheduler, SchedulerConfig
from deepserve.engine.step import StepPlan, StepResult

VOCAB_SIZE = 129_280
GOALS_MS = {"decode step": 5.0, "prefix lookup": 2.0}


def make_scheduler(num_seqs: int, num_pages: int, max_num_batched_tokens: int) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_chunk_tokens=max_num_batched_tokens,
        chunked_prefill=True,
        eos_token_ids=frozenset({1}),
    )
    return Scheduler(config, Pages(num_pages, PAGE_SIZE))


def answer(plan: StepPlan) -> StepResult:
    """Token 7 for every draw: never the end."""
    return StepResult(plan.step, [[7] for _ in plan.draws], {}, {})


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]


def time_ms(action: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def bench_decode(num_seqs: int, repeats: int) -> tuple[list[float], list[float]]:
    """Times of plan and of apply in steady decode. Lengths are spread, so each step some sequences need a page and publish one."""
    rng = random.Random(0)
    max_tokens = repeats + 100
    pages_per_seq = (2 * PAGE_SIZE + max_tokens) // PAGE_SIZE + 1
    scheduler = make_scheduler(num_seqs, num_seqs * pages_per_seq, 1 << 20)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0)
    for i in range(num_seqs):
        scheduler.add(f"request-{i}", random_prompt(rng, PAGE_SIZE + rng.randrange(PAGE_SIZE)), params)
    for _ in range(20):
        scheduler.apply(answer(scheduler.plan()))
    plan_ms, apply_ms = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        result = answer(plan)
        answered = time.perf_counter()
        outputs = scheduler.apply(result)
        apply_ms.append((time.perf_counter() - answered) * 1e3)
        plan_ms.append((planned - started) * 1e3)
        assert len(outputs) == num_seqs
    scheduler.check()
    return plan_ms, apply_ms


def bench_prefix(prompt_len: int, repeats: int) -> tuple[list[float], list[float]]:
    """Times of looking up a fully cached prompt, and of the plan that admits it (lookup, pages held, row told to the runner)."""
    prompt = random_prompt(random.Random(0), prompt_len)
    scheduler = make_scheduler(1, prompt_len // PAGE_SIZE + 2, prompt_len)
    params = SamplingParams(max_tokens=8, temperature=0.0, seed=0)
    scheduler.add("first", prompt, params)
    while scheduler.has_work:
        scheduler.apply(answer(scheduler.plan()))
    tokens = array("i", prompt)
    match_ms = time_ms(lambda: scheduler.pages.match(tokens, ""), repeats)
    hits, _ = scheduler.pages.match(tokens, "")
    assert len(hits) == (prompt_len - 1) // PAGE_SIZE, "the prompt is not fully cached"
    admit_ms = []
    for i in range(repeats):
        scheduler.add(f"again-{i}", prompt, params)
        admit_ms += time_ms(scheduler.plan, 1)
        scheduler.discard()
        scheduler.abort(f"again-{i}")
    scheduler.check()
    return match_ms, admit_ms


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown")


def measure(num_seqs: int, prompt_len: int, repeats: int) -> dict:
    plan_ms, apply_ms = bench_decode(num_seqs, repeats)
    match_ms, admit_ms = bench_prefix(prompt_len, repeats)
    step_ms = [plan + apply for plan, apply in zip(plan_ms, apply_ms, strict=True)]
    rows = {"decode step": step_ms, "  of it plan": plan_ms, "  of it apply": apply_ms, "prefix lookup": match_ms, "admission": admit_ms}
    return {
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "num_seqs": num_seqs,
        "prompt_len": prompt_len,
        "repeats": repeats,
        "rows": {
            name: {"median_ms": statistics.median(times), "p90_ms": sorted(times)[len(times) * 9 // 10]} for name, times in rows.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, default=1024)
    parser.add_argument("--prompt-len", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args.num_seqs, args.prompt_len, args.repeats)
    print(f"scheduler on the host: Python {found['python']}, {found['cpu']}, medians of {args.repeats} runs")
    print(f"decode step: {args.num_seqs} sequences; prefix: {args.prompt_len} tokens, all cached, pages of {PAGE_SIZE}\n")
    print(f"{'':<16}{'median ms':>12}{'p90 ms':>12}{'goal ms':>12}")
    for name, row in found["rows"].items():
        goal = f"{GOALS_MS[name]:.1f}" if name in GOALS_MS else ""
        print(f"{name:<16}{row['median_ms']:>12.3f}{row['p90_ms']:>12.3f}{goal:>12}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
