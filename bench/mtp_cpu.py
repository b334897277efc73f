"""Speculative decoding with the shipped model on a CPU: speed with and without drafts, and how many stand.

    python bench/mtp_cpu.py [--drafts 1 2 3] [--rounds 5] [--traffic chat] [--together 16] [--threads 2] [--json FILE]

Chat: held-out exchanges of the tasks that the model was trained for (those that need none of its texts), greedy, to their end. Text:
openings of prose, continued greedily for 32 to 96 tokens. Random: prompts of random tokens, continued at temperature 5, so that next to no
draft stands. One sequence at a time, timed from its first token on; or 16, where the next request follows when one is through, timed
from the start until there are no more to follow. (Sixteen that all start together and are waited for would be a few of them most of the
time, and the fewer, the more drafts make them differ.)

Engines take turns request by request (or batch by batch), so that whatever else the machine does falls on all alike, and each round
shuffles their order. A figure is the median over rounds; ratios are of the same round. On a busy machine `--clock cpu` counts the seconds
that the process computed instead of those that went by. Where the machine's cores were near each other in some rounds and far in others
(`bench/core_distance.py`), there is a line for either.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from core_distance import FAR_NS, round_trip_ns

from deepserve.config import EngineArgs, SpeculativeConfig
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.request import SamplingParams, validate
from deepserve.messages import Submit
from deepserve.model.hub import SHIPPED_FOLDER
from deepserve.text.tokenizer import Tokenizer

OPENINGS = [
    "It was a fine morning when", "She had always been of the opinion that", "And it came to pass in those days, that",
    "In order to install the", "The following example shows how to", "He looked at her for a moment, and", "This function returns",
    "There was a man in the city",
]  # fmt: skip
TRAINING = Path(__file__).parents[1] / "models" / "deepserve-tiny" / "train"
TASKS = ("add", "sub", "mul", "wordproblem", "compare", "sort", "minmax", "count", "capital", "talk", "story", "email", "chain", "json",
         "jsonmath", "chinese")  # fmt: skip
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: list[int]
    params: SamplingParams


def held_out(num: int, mode: str) -> list[Job]:
    """Exchanges that were kept out of training, a task after the other. mode: "bare", or "think31" with reasoning before the answer."""
    spec = importlib.util.spec_from_file_location("training_data", TRAINING / "data.py")
    assert spec is not None and spec.loader is not None
    data = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up
    spec.loader.exec_module(data)
    rng, tokenizer = random.Random(0), Tokenizer.from_folder(SHIPPED_FOLDER)
    jobs = []
    for i in range(num):
        exchange = data.sample_ex(rng, None, TASKS[i % len(TASKS)], heldout=True)
        turns = [(past, True) for past in exchange.history] + [(exchange, False)]
        text = data.render_prompt(exchange.system, exchange.tools, turns, mode)
        jobs.append(Job(tokenizer.encode(text), SamplingParams(temperature=0.0, max_tokens=200)))
    return jobs


def print_acceptance(num: int, threads: int | None) -> None:
    """How many drafts of held-out exchanges stand, beside what the model's page says of a decoder that walks such text."""
    measured = json.loads((TRAINING / "measured.json").read_text())["mtp"]
    for mode, name in (("bare", "mixed"), ("think31", "thinking")):
        engine, page = make_engine(2, False, threads), measured[name]
        jobs = held_out(num, mode)
        for low in range(0, num, 16):  # of more at once fewer drafts would be verified
            for i, job in enumerate(jobs[low : low + 16]):
                submit(engine, str(i), job)
            while engine.has_work:
                engine.step()
        load = engine.load()
        first, second = (b / a for a, b in pairwise([load.num_drafts, *load.num_accepted_by_position]))
        kept = 1 + load.num_accepted_tokens / load.num_drafts
        print(
            f"{num} held-out exchanges, {name}, 2 drafts: first stands {first:.3f} (model's page: {page['one_step']:.3f}), second given "
            f"the first {second:.3f} ({page['second_step_given_first']['post']:.3f}), tokens a step {kept:.2f} "
            f"({page['tokens_per_target_pass']['k2post']:.2f})",
            flush=True,
        )


def jobs_of(traffic: str, num: int, vocab_size: int) -> list[Job]:
    if traffic == "chat":
        return held_out(num, "bare")
    rng = random.Random(0)
    lengths = [rng.randint(32, 96) for _ in range(num)]
    if traffic == "text":
        tokenizer = Tokenizer.from_folder(SHIPPED_FOLDER)
        prompts = [tokenizer.encode(OPENINGS[i % len(OPENINGS)]) for i in range(num)]
        return [
            Job(prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True))
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
    return [
        Job([rng.randrange(5, vocab_size) for _ in range(24)], SamplingParams(temperature=5.0, max_tokens=length, ignore_eos=True, seed=i))
        for i, length in enumerate(lengths)
    ]


def make_engine(num_drafts: int, adaptive: bool, threads: int | None, graphs: bool | None = None) -> Engine:
    speculative = SpeculativeConfig(num_speculative_tokens=num_drafts, adaptive=adaptive)
    args = EngineArgs(speculative_config=speculative, max_model_len=1024, num_threads=threads, enable_prefix_caching=False, graphs=graphs)
    return Engine(resolve(args), progress=False)


def submit(engine: Engine, name: str, job: Job) -> None:
    engine.submit(Submit(name, job.prompt, validate(job.prompt, job.params, engine.limits)))


def run_one(engine: Engine, job: Job, clock: Callable[[], float]) -> tuple[float, int]:
    """Seconds and tokens of a request that is alone, from its first token on."""
    before = engine.load().num_generated_tokens
    submit(engine, "0", job)
    while engine.load().num_generated_tokens == before:
        engine.step()
    started = clock()
    while engine.has_work:
        engine.step()
    return clock() - started, engine.load().num_generated_tokens - before - 1


def run_many(engine: Engine, jobs: list[Job], together: int, clock: Callable[[], float]) -> tuple[float, int]:
    """Seconds and tokens while `together` requests run; those that are left without a successor are not waited for."""
    before, num_sent, started = engine.load().num_generated_tokens, 0, clock()
    while num_sent < len(jobs) or len(engine.scheduler.running) == together:
        while num_sent < len(jobs) and len(engine.scheduler.running) + engine.scheduler.num_waiting < together:
            submit(engine, str(num_sent), jobs[num_sent])
            num_sent += 1
        engine.step()
    took, num_tokens = clock() - started, engine.load().num_generated_tokens - before
    engine.abort([str(i) for i in range(num_sent)])
    return took, num_tokens


@dataclass(frozen=True)
class Rounds:
    """What was measured, a value for each round."""

    speeds: dict[str, list[float]]  # tokens per second of each engine
    cores: list[str]  # "near", "far", or "" where that changed or cannot be told

    def of(self, cores: str) -> "Rounds":
        kept = [i for i, where in enumerate(self.cores) if where == cores]
        return Rounds({name: [values[i] for i in kept] for name, values in self.speeds.items()}, [cores] * len(kept))

    def median(self, name: str) -> float:
        return statistics.median(self.speeds[name])

    def ratio(self, name: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(self.speeds[name], self.speeds[to], strict=True))

    def line(self, title: str) -> str:
        """Speeds; the best number of drafts to none; the adaptive choice to none and to the best number, none among them."""
        fixed = [name for name in self.speeds if name != "adaptive"]
        drafts, best = max(fixed[1:], key=self.median), max(fixed, key=self.median)
        ratios = f"{self.ratio(drafts, 'off'):>12.2f}{self.ratio('adaptive', 'off'):>14.2f}{self.ratio('adaptive', best):>17.2f}"
        return f"{title:<30}" + "".join(f"{self.median(name):>12.0f}" for name in self.speeds) + ratios


def _where(*round_trips: float | None) -> str:
    if None in round_trips or len({took > FAR_NS for took in round_trips}) > 1:
        return ""
    return "far" if round_trips[0] > FAR_NS else "near"


def measure(engines: dict[str, Engine], jobs: list[Job], together: int, rounds: int, clock: Callable[[], float]) -> Rounds:
    rng = random.Random(1)
    found = Rounds({name: [] for name in engines}, [])
    for number in range(rounds + 1):
        before = round_trip_ns()
        seconds, tokens = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
        for turn in [[job] for job in jobs] if together == 1 else [jobs]:
            for name in rng.sample(sorted(engines), len(engines)):
                took, num = run_one(engines[name], turn[0], clock) if together == 1 else run_many(engines[name], turn, together, clock)
                seconds[name] += took
                tokens[name] += num
        assert together > 1 or len(set(tokens.values())) == 1, tokens
        if number:  # the first round warms up
            for name in engines:
                found.speeds[name].append(tokens[name] / seconds[name])
            found.cores.append(_where(before, round_trip_ns()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of an engine; by default what one takes if nobody says otherwise")
    parser.add_argument("--traffic", nargs="+", default=["chat", "text", "random"])
    parser.add_argument("--together", type=int, nargs="+", default=[1, 16], help="requests that run at once")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--exchanges", type=int, default=96, help="held-out exchanges whose acceptance is counted; 0: none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = {"off": (0, False), **{f"{k} drafts": (k, False) for k in args.drafts}, "adaptive": (max(args.drafts), True)}
    busy = f"load average {os.getloadavg()[0]:.1f} at the start"
    threads = args.threads or torch.get_num_threads()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {threads} thread(s), {args.clock} time, {busy}")
    print(
        f"{'':<30}"
        + "".join(f"{name:>12}" for name in names)
        + "  drafts/off  adaptive/off  adaptive/best k  rounds near/far   acceptance by place"
    )
    rows = []
    for traffic in args.traffic:
        for together in args.together:
            # New ones for each row, so that the adaptive one has to find its way.
            engines = {name: make_engine(k, adaptive, args.threads) for name, (k, adaptive) in names.items()}
            jobs = jobs_of(traffic, 16 if together == 1 else 4 * together, engines["off"].limits.vocab_size)
            found = measure(engines, jobs, together, args.rounds, CLOCKS[args.clock])
            load = engines[f"{max(args.drafts)} drafts"].load()
            places = [load.num_drafts, *load.num_accepted_by_position]
            acceptance = [b / a if a else 0.0 for a, b in pairwise(places)]
            rows.append({"traffic": traffic, "together": together, **vars(found), "acceptance": acceptance})
            where = f"{found.cores.count('near')}/{found.cores.count('far')}"
            print(found.line(f"{traffic}, {together} at a time") + f"{where:>17}  ", *(f"{share:.2f}" for share in acceptance), flush=True)
            parts = {where: found.of(where) for where in ("near", "far")}
            for where, part in parts.items() if all(part.cores for part in parts.values()) else ():
                print(part.line(f"  {len(part.cores)} rounds, cores {where}"), flush=True)
    if args.exchanges:
        print_acceptance(args.exchanges, args.threads)
    print(f"tokens per second; load average {os.getloadavg()[0]:.1f} at the end")
    if args.json:
        machine = {
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "threads": args.threads or torch.get_num_threads(),
            "clock": args.clock,
        }
        args.json.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
