"""Instances of several ranks: the same tokens at any layout, whatever is cut, cached or preempted; no stall; nothing done while idle.

Every layout starts once and serves all tests that name it.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from deepserve import LLM, SamplingParams
from deepserve.llm import RequestOutput
from deepserve.model.hub import SHIPPED_FOLDER
from deepserve.pool import RankPool
from tests.deepserve.serving import WAIT_S, Served

CASES = json.loads((SHIPPED_FOLDER / "expected.json").read_text())["cases"]
MIN_MARGIN = 1e-3  # a choice that is closer may differ between numerics; what follows is not compared
TOLERANCE = 1e-3  # of a log-probability

# Ranks replay graphs of different sizes, run prefill beside them, and idle, all with one size of the dispatch.
CAPTURED = {"graphs": True, "async_scheduling": True, "max_num_seqs": 12, "max_dispatch_tokens_per_rank": 12}
DRAFTS = {"speculative_config": {"num_speculative_tokens": 2, "adaptive": False}}
# Experts move all the time, in a few slices, whatever little it gains.
MOVING = {
    "eplb_config": {
        "num_redundant_experts": 6, "step_interval": 2, "window_size": 4, "tolerance": 0.0, "hysteresis": 0.0, "step_budget_ms": 1.0,
    },
}  # fmt: skip
# All prefill steps as two micro-batches, and decode steps of many tokens.
OVERLAPPED = {"enable_dbo": True, "dbo_prefill_token_threshold": 1, "dbo_decode_token_threshold": 3}
# Every layout with some of: prompts cut into chunks, prefixes found, too few pages.
LAYOUTS = {
    "dp2": {"data_parallel_size": 2, "max_num_batched_tokens": 40},
    "dp3": {"data_parallel_size": 3, "enable_prefix_caching": False, "num_pages": 3},
    "tp2": {"tensor_parallel_size": 2, "max_num_batched_tokens": 64, "num_pages": 14},
    "tp2 with drafts": {"tensor_parallel_size": 2, "max_num_batched_tokens": 64, "async_scheduling": True, **DRAFTS},
    "dp2 captured with drafts": {"data_parallel_size": 2, "num_pages": 4, **CAPTURED, **DRAFTS, **OVERLAPPED},
    "tp2 dp2": {"tensor_parallel_size": 2, "data_parallel_size": 2, "num_pages": 4, **MOVING, **OVERLAPPED},
    "tp2 captured": {"tensor_parallel_size": 2, "max_num_batched_tokens": 64, **CAPTURED},
}
# 32 experts over 3 ranks: 11 slots each, the spare one holds a replica; 4 redundant ones put most experts elsewhere.
INVARIANT_LAYOUTS = {
    "one rank": {},
    "tp2": {"tensor_parallel_size": 2},
    "dp2": {"data_parallel_size": 2, "max_num_batched_tokens": 48},
    "dp3": {"data_parallel_size": 3, "max_num_seqs": 3},
    "dp2 captured": {"data_parallel_size": 2, "max_num_batched_tokens": 48, **CAPTURED},
    # Each replica finds its own number of drafts, and sees those of the other through.
    "dp2 with drafts": {"data_parallel_size": 2, "max_num_batched_tokens": 48, "num_speculative_tokens": 3},
    "tp2 dp2 with drafts": {"tensor_parallel_size": 2, "data_parallel_size": 2, "async_scheduling": True, **DRAFTS},
    "dp3 with replicas": {"data_parallel_size": 3, "num_redundant_experts": 4, "long_prefill_token_threshold": 30, "max_num_seqs": 8},
    "dp2 moving, captured": {"data_parallel_size": 2, "max_num_batched_tokens": 48, **CAPTURED, **MOVING, **OVERLAPPED},
    "dp3 moving": {"data_parallel_size": 3, "max_num_seqs": 8, **MOVING},
    "dp4 moving, drafts": {"data_parallel_size": 4, "num_speculative_tokens": 2, **MOVING},
    "dp3 moving, drafts": {"data_parallel_size": 3, "max_num_seqs": 8, "num_speculative_tokens": 2, **MOVING},
}
# What each of them adds stands in another layout as well, and starting ranks is most of what these tests take.
LONG = ("dp2", "dp3", "tp2")
LONG_INVARIANT = ("dp2", "dp3", "dp2 captured", "dp2 with drafts", "tp2 dp2 with drafts", "dp3 moving", "dp4 moving, drafts")


def layouts(names: Iterable[str], long: tuple[str, ...]) -> list:
    return [pytest.param(name, marks=[pytest.mark.long] * (name in long)) for name in names]


@pytest.fixture(scope="module")
def llm_of():
    """`llm_of(**options)`: an LLM, made once."""
    made: dict[str, LLM] = {}

    def get(**options) -> LLM:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = LLM(dtype="float32", max_model_len=1024, num_threads=1, **{"num_pages": 40, **options})
        return made[key]

    yield get
    for llm in made.values():
        llm.shutdown()


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    """Fails instead of waiting for ever."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(llm.generate, [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        try:
            return job.result(WAIT_S)
        except TimeoutError:
            for pid in llm.engine.pids:
                psutil.Process(pid).kill()  # ends the job
            raise


def logprobs(output: RequestOutput) -> list[list[float]]:
    return [[at[t].logprob for at, t in zip(s.logprobs, s.token_ids, strict=True)] for s in output.outputs]


@pytest.mark.parametrize("layout", layouts(LAYOUTS, LONG))
def test_greedy_tokens_are_the_references(llm_of: Callable[..., LLM], layout: str):
    options = LAYOUTS[layout]
    num_ranks = options.get("data_parallel_size", 1) * options.get("tensor_parallel_size", 1)
    llm = llm_of(**options)
    assert isinstance(llm.engine, RankPool) and len(llm.engine.pids) == num_ranks
    few_pages = "num_pages" in options
    cases = [case for case in CASES if not few_pages or len(case["prompt_ids"]) + 32 <= llm.engine.limits.max_seq_tokens]
    assert len(cases) >= 20
    for num_tokens in (32, 4):  # the second time prefixes are there to be found
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
        for case, output in zip(cases, generate(llm, [case["prompt_ids"] for case in cases], params), strict=True):
            clear = next((i for i, margin in enumerate(case["margin"][:num_tokens]) if margin < MIN_MARGIN), num_tokens)
            sequence = output.outputs[0]
            assert sequence.token_ids[:clear] == case["output_ids"][:clear], case["name"]
            (found,) = logprobs(output)
            assert found[:clear] == pytest.approx(case["logprobs"][:clear], abs=TOLERANCE), case["name"]
    loads = llm.engine.loads
    if "eplb_config" in options:
        assert any(load.num_moved_experts > 0 for load in loads.values())
    assert len(loads) == options.get("data_parallel_size", 1)
    if few_pages:
        assert any(load.num_preemptions > 0 for load in loads.values()), loads
    if "enable_prefix_caching" not in options and not few_pages:
        assert all(load.num_prefix_hit_tokens > 0 for load in loads.values()), loads
    assert all(load.num_generated_tokens > 0 for load in loads.values()), "a replica had nothing to do"
    assert all(load.num_held_pages == load.num_running == load.num_waiting == 0 for load in loads.values()), loads


@pytest.fixture(scope="module")
def invariant_answers(llm_of: Callable[..., LLM]) -> Callable[[str], dict]:
    """`invariant_answers("dp2")`: tokens and log-probabilities of every expected prompt, greedy and seeded, in one batch."""
    made: dict[str, dict] = {}

    def get(layout: str) -> dict:
        if layout not in made:
            llm = llm_of(batch_invariant=True, **INVARIANT_LAYOUTS[layout])
            greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
            seeded = [SamplingParams(temperature=1.3, top_p=0.95, n=2, seed=i, max_tokens=8, logprobs=0) for i in range(len(CASES))]
            prompts = [case["prompt_ids"] for case in CASES]
            outputs = generate(llm, prompts * 2, [greedy] * len(CASES) + seeded)
            made[layout] = {
                "tokens": [[s.token_ids for s in output.outputs] for output in outputs],
                "logprobs": [logprobs(output) for output in outputs],
                "prompt logprobs": [
                    [at[t].logprob for at, t in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)]
                    for o in outputs[: len(CASES)]
                ],
            }
        return made[layout]

    return get


@pytest.mark.parametrize("layout", layouts([name for name in INVARIANT_LAYOUTS if name not in ("one rank", "tp2")], LONG_INVARIANT))
def test_batch_invariant_results_are_bitwise_the_same_at_any_layout(
    llm_of: Callable[..., LLM], invariant_answers: Callable[[str], dict], layout: str
):
    """Of one TP size: the ranks of a TP group add up parts of a sum, which rounds in other places."""
    alone, found = invariant_answers("tp2" if "tp2" in layout else "one rank"), invariant_answers(layout)
    for kind, values in alone.items():
        for number, (one, other) in enumerate(zip(values, found[kind], strict=True)):
            assert one == other, f"{kind} of prompt {number}"
    num_seeded = len(CASES)
    assert len({str(tokens) for tokens in alone["tokens"][num_seeded:]}) > 10, "seeds make little difference; the test shows little"
    if "moving" in layout:
        moved = [load.num_moved_experts for load in llm_of(batch_invariant=True, **INVARIANT_LAYOUTS[layout]).engine.loads.values()]
        assert sum(moved) > 0, moved


@pytest.mark.parametrize(("layout", "options"), [("tp2 captured", LAYOUTS), ("dp2 moving, captured", INVARIANT_LAYOUTS)])
def test_captured_steps_of_several_ranks_draw_inside(llm_of: Callable[..., LLM], layout: str, options: dict):
    """Without log-probabilities nothing is left to do behind a graph. Sequences end apart, so that ranks differ in size and idle."""
    options = options[layout] | ({"batch_invariant": True} if "dp2" in layout else {})
    prompts = [case["prompt_ids"] for case in CASES]
    lengths = [1 + 5 * i % 31 for i in range(len(CASES))]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    for case, length, output in zip(CASES, lengths, generate(llm_of(**options), prompts, params), strict=True):
        clear = next((i for i, margin in enumerate(case["margin"][:length]) if margin < MIN_MARGIN), length)
        assert output.outputs[0].token_ids[:clear] == case["output_ids"][:clear], case["name"]


def test_seeded_draws_inside_captured_steps_are_those_of_one_rank(llm_of: Callable[..., LLM], invariant_answers: Callable[[str], dict]):
    llm = llm_of(batch_invariant=True, **INVARIANT_LAYOUTS["dp2 moving, captured"])
    params = [SamplingParams(temperature=1.3, top_p=0.95, n=2, seed=i, max_tokens=8) for i in range(len(CASES))]
    outputs = generate(llm, [case["prompt_ids"] for case in CASES], params)
    found = [[s.token_ids for s in output.outputs] for output in outputs]
    assert found == invariant_answers("one rank")["tokens"][len(CASES) :]


# -- ranks with nothing or too much to do --


@pytest.fixture(scope="module")
def uneven(llm_of: Callable[..., LLM]) -> LLM:
    return llm_of(batch_invariant=True, **INVARIANT_LAYOUTS["dp3 with replicas"])


def test_one_request_then_bursts_then_silence_then_one(uneven: LLM):
    """Ranks without work of their own serve the others' tokens, park together and wake together."""
    prompts = [case["prompt_ids"][:40] for case in CASES]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (alone,) = generate(uneven, prompts[:1], params)
    for num in (30, 2, 17, 1, 4):
        outputs = generate(uneven, [prompts[i % len(prompts)] for i in range(num)], params)
        assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids
        assert all(len(output.outputs[0].token_ids) == 6 for output in outputs)
    idle_share(uneven.engine.pids, 0.5)  # long enough to park
    (again,) = generate(uneven, prompts[:1], params)
    assert again.outputs[0].token_ids == alone.outputs[0].token_ids


def test_wake_ups_from_a_park_are_quick(uneven: LLM):
    """A rank that is woken late, or by a timeout only, would show as a stall."""
    params = SamplingParams(temperature=0, max_tokens=1)
    started = time.monotonic()
    for i in range(40):
        generate(uneven, [[5 + i]], params)
    assert time.monotonic() - started < 20.0


def idle_share(pids: list[int], seconds: float) -> list[float]:
    """CPU seconds of each process per second, measured."""

    def used() -> list[float]:
        return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]

    before, started = used(), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - started
    return [(after - first) / took for after, first in zip(used(), before, strict=True)]


def test_parked_ranks_use_no_cpu(llm_of: Callable[..., LLM], uneven: LLM):
    pids = []
    for llm in (uneven, llm_of(**LAYOUTS["tp2 dp2"])):
        generate(llm, [[5, 6, 7]] * 8, SamplingParams(max_tokens=4))
        pids += llm.engine.pids
    idle_share(pids, 0.3)  # until they park
    shares = idle_share(pids, 3.0)
    assert len(shares) == 7 and max(shares) < 0.03, shares


# -- through the frontend --

NUM_REQUESTS = 1000
NUM_CLIENTS = 48


@pytest.fixture(scope="module")
def served():
    flags = ("--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--num-threads", "1")
    with Served("--dp", "3", "--kv-cache-memory-bytes", str(24 * 61440), *flags) as server:
        yield server


def by_engine(served: Served, name: str) -> dict[str, float]:
    """Values of a metric by engine label, other labels summed."""
    found: dict[str, float] = {}
    for line in httpx.get(served.url + "/metrics").text.splitlines():
        if line.startswith(name + "{"):
            label = line.split('engine="')[1].split('"')[0]
            found[label] = found.get(label, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def random_body(rng: random.Random) -> dict:
    """Short; some share a prefix, some ask for two answers."""
    shared = [7] * rng.choice([0, 0, 64, 130])
    prompt = shared + [rng.randrange(5, 4000) for _ in range(rng.randint(1, 40))]
    body = {
        "model": "deepserve-tiny",
        "prompt": prompt,
        "max_tokens": rng.randint(1, 10),
        "temperature": 1.0,
        "seed": rng.randrange(1 << 30),
    }
    return {**body, "n": rng.choice([1, 1, 1, 2]), "ignore_eos": rng.random() < 0.7}


async def send(http: httpx.AsyncClient, rng: random.Random) -> dict | None:
    """One request; its usage, or None if it was left half-way."""
    body = random_body(rng)
    if rng.random() < 0.7:
        reply = await http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["usage"]
    leave_after = rng.randint(0, 3)
    async with http.stream("POST", "/v1/completions", json={**body, "max_tokens": 200, "ignore_eos": True, "stream": True}) as reply:
        assert reply.status_code == 200
        num = 0
        async for line in reply.aiter_lines():
            num += line.startswith("data")
            if num >= leave_after:
                return None
    return None


def flood(url: str, seed: int, num: int) -> list[dict | None]:
    async def run() -> list[dict | None]:
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        gate = asyncio.Semaphore(NUM_CLIENTS)

        async def one(i: int) -> dict | None:
            async with gate:
                return await send(http, random.Random(seed + i))

        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as http:
            return await asyncio.gather(*(one(i) for i in range(num)))

    return asyncio.run(run())


def wait_until_empty(served: Served) -> None:
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        served.wait_for_metric(name, 0)


def test_a_thousand_requests_with_aborts_leave_nothing_on_any_rank(served: Served, seed: int):
    usages = flood(served.url, seed, NUM_REQUESTS)
    finished = [usage for usage in usages if usage is not None]
    assert 500 < len(finished) < 900
    wait_until_empty(served)
    labels = {"0", "1", "2"}
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert by_engine(served, name) == dict.fromkeys(labels, 0.0)
    generated = by_engine(served, "vllm:generation_tokens_total")
    assert set(generated) == labels
    assert min(generated.values()) > 0.5 * max(generated.values()), f"work was not spread: {generated}"
    ended = by_engine(served, "vllm:request_success_total")
    assert sum(ended.values()) >= len(finished)
    assert min(ended.values()) > 0.5 * max(ended.values()), ended
    # The server is as good as new.
    body = {"model": "deepserve-tiny", "messages": [{"role": "user", "content": "What is 12+30?"}], "temperature": 0}
    for _ in range(3):
        assert "42" in httpx.post(served.url + "/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def test_metrics_of_the_ranks_add_up(served: Served):
    names = (
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:request_success_total",
        "vllm:e2e_request_latency_seconds_count",
    )
    before = [served.metric(name) for name in names]
    prompts = [[5 + i] * (3 + i) for i in range(12)]
    body = {"model": "deepserve-tiny", "max_tokens": 5, "n": 2, "ignore_eos": True}
    usages = [httpx.post(served.url + "/v1/completions", json={**body, "prompt": p}, timeout=WAIT_S).json()["usage"] for p in prompts]
    generated, computed, ended, timed = (served.metric(name) - first for name, first in zip(names, before, strict=True))
    assert generated == sum(usage["completion_tokens"] for usage in usages) == 12 * 2 * 5
    assert computed == sum(usage["prompt_tokens"] for usage in usages)
    assert ended == timed == 24
