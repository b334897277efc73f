"""What many ranks cost on one machine: the vote of a step, dispatch and combine of an MoE layer, and the speed of 200 mixed requests.

    python bench/parallel_cpu.py [--model deepserve-tiny] [--requests 200] [--repeats 200] [--threads N] [--json FILE]

Everything is measured in real rank processes over gloo on loopback. Ranks of one machine share its cores, so more of them do not make it
faster here; the table says what lockstep and the experts' traffic add. A rank has the threads that its share of the cores gives, at least
one: with more ranks than cores each figure also holds the wait for a core.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import zmq

from deepserve import LLM, SamplingParams
from deepserve.config import EngineArgs
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.lockstep import Ballot, Lockstep
from deepserve.spawn import SPIN_COUNT
from hw.api import Activation, ExpertMode, ExpertStep
from hw.groups import Rendezvous, open_groups

DP_SIZES = (1, 2, 4)
LAYOUTS = {"dp 1": (1, 1), "dp 2": (2, 1), "dp 4": (4, 1), "tp 2": (1, 2)}
# Tokens of each rank: a decode step of 16 sequences, and a prefill step that is beyond the cap of the low-latency mode.
STEPS = {
    "low latency, 16 tokens": (ExpertMode.LOW_LATENCY, 16),
    "throughput, 16 tokens": (ExpertMode.THROUGHPUT, 16),
    "throughput, 256 tokens": (ExpertMode.THROUGHPUT, 256),
}
TIMEOUT_S = 120.0
WARM_UP = 10


def threads_of(num_ranks: int, threads: int | None) -> int:
    return threads or max(1, (os.cpu_count() or 1) // num_ranks)


# -- one rank --


def run_rank(rank: int, dp: int, options: dict, repeats: int, folder: str, results: multiprocessing.Queue) -> None:
    """Puts median milliseconds of this rank, by name."""
    config = resolve(EngineArgs(data_parallel_size=dp, num_pages=8, max_model_len=512, **options))
    rendezvous = Rendezvous(dist.FileStore(f"{folder}/rendezvous", dp), TIMEOUT_S) if dp > 1 else None
    groups = open_groups(config.parallel, rank, rendezvous)
    engine = Engine(config, groups, progress=False)
    lockstep = Lockstep(groups, zmq.Context.instance(), engine.config.args.max_dispatch_tokens_per_rank)
    found = {"vote": time_ms(lambda: lockstep.vote(Ballot(1, True)), repeats)}
    layer = next(layer.moe for layer in engine.runner.model.layers if layer.moe is not None)
    torch.manual_seed(rank)
    for name, (mode, num_tokens) in STEPS.items():
        x = torch.randn(num_tokens, config.model.hidden_size, dtype=engine.runner.model.dtype)
        found[name] = time_layer_ms(layer, x, ExpertStep(mode, num_tokens), groups.world.barrier, repeats)
    results.put((rank, found))


def time_ms(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(WARM_UP + repeats):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:]) * 1e3


@torch.inference_mode()
def time_layer_ms(layer, x: torch.Tensor, step: ExpertStep, barrier: Callable[[], None], repeats: int) -> dict[str, float]:
    """Of one layer: dispatch, experts, combine. Ranks start each of them together."""
    times: dict[str, list[float]] = {"dispatch": [], "experts": [], "combine": []}
    routed = layer.route(x)
    for _ in range(WARM_UP + repeats):
        marks = []
        barrier()
        marks.append(time.perf_counter())
        dispatched = layer.dispatch(Activation(x), routed, step)
        marks.append(time.perf_counter())
        y = layer.experts(dispatched)
        times["experts"].append(time.perf_counter() - marks[1])
        barrier()
        marks.append(time.perf_counter())
        layer.combine(y, routed, dispatched, None)
        times["dispatch"].append(marks[1] - marks[0])
        times["combine"].append(time.perf_counter() - marks[2])
    return {name: statistics.median(values[WARM_UP:]) * 1e3 for name, values in times.items()}


def measure_steps(dp: int, options: dict, repeats: int) -> dict:
    """The slowest rank's medians."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run_rank, args=(rank, dp, options, repeats, folder, results), daemon=True) for rank in range(dp)]
        for process in ranks:
            process.start()
        by_rank = dict(results.get(timeout=TIMEOUT_S) for _ in ranks)
        for process in ranks:
            process.join()
    worst = {"vote": max(found["vote"] for found in by_rank.values())}
    for name in STEPS:
        worst[name] = {part: max(found[name][part] for found in by_rank.values()) for part in by_rank[0][name]}
    return worst


# -- whole requests --


def mixed_requests(num: int, vocab_size: int) -> tuple[list[dict], list[SamplingParams]]:
    """Prompts of 8 to 200 tokens, answers of 8 to 40."""
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(5, vocab_size) for _ in range(rng.randint(8, 200))]} for _ in range(num)]
    params = [SamplingParams(temperature=0.0, max_tokens=rng.randint(8, 40), ignore_eos=True) for _ in range(num)]
    return prompts, params


def measure_requests(dp: int, tp: int, options: dict, num: int) -> dict:
    sizes = {"data_parallel_size": dp, "tensor_parallel_size": tp}
    with LLM(max_model_len=512, num_pages=1024, skip_tokenizer_init=True, **sizes, **options) as llm:
        prompts, params = mixed_requests(num, llm.engine.limits.vocab_size)
        llm.generate(prompts[:4], params[:4], use_tqdm=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    computed = sum(len(output.prompt_token_ids) for output in outputs)
    return {"seconds": seconds, "generated_tokens_per_s": generated / seconds, "all_tokens_per_s": (generated + computed) / seconds}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deepserve-tiny")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, help="of each rank; default: its share of the cores")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)  # of the processes to come, as ranks that are spawned have it
    cores = os.cpu_count() or 1

    def options(num_ranks: int) -> dict:
        return {"model": args.model, "dtype": args.dtype, "num_threads": threads_of(num_ranks, args.threads)}

    print(f"{args.model}, {cpu_name()}, {cores} cores, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f} at the start")
    print(
        "threads of each rank: " + ", ".join(f"{threads_of(dp * tp, args.threads)} ({name})" for name, (dp, tp) in LAYOUTS.items()) + "\n"
    )
    steps = {f"dp {dp}": measure_steps(dp, options(dp), args.repeats) for dp in DP_SIZES}
    requests = {}
    for name, (dp, tp) in LAYOUTS.items():
        # In a process of its own, since an LLM of one rank computes where it is made.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            requests[name] = pool.submit(measure_requests, dp, tp, options(dp * tp), args.requests).result()

    rows: dict[str, dict[str, float]] = {"vote, ms a step": {name: found["vote"] for name, found in steps.items()}}
    for name in STEPS:
        for part in ("dispatch", "combine", "experts"):
            rows[f"{name}: {part}, ms a layer"] = {layout: found[name][part] for layout, found in steps.items()}
    rows[f"{args.requests} requests: generated tokens/s"] = {name: found["generated_tokens_per_s"] for name, found in requests.items()}
    rows[f"{args.requests} requests: all tokens/s"] = {name: found["all_tokens_per_s"] for name, found in requests.items()}
    print(f"{'':<46}" + "".join(f"{name:>10}" for name in LAYOUTS))
    for title, values in rows.items():
        digits = 0 if title.endswith("/s") else 3
        print(f"{title:<46}" + "".join(f"{values[name]:>10.{digits}f}" if name in values else f"{'':>10}" for name in LAYOUTS))
    if args.json:
        machine = {"cpu": cpu_name(), "cores": cores, "torch": torch.__version__, "model": args.model}
        threads = {name: threads_of(dp * tp, args.threads) for name, (dp, tp) in LAYOUTS.items()}
        args.json.write_text(json.dumps({**machine, "threads": threads, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
