"""Instances of two accelerators: the same tokens as the reference at any layout, recorded steps or not; and what a death comes to."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from deepserve import LLM, SamplingParams
from deepserve.pool import RankLost
from hw.testing import available_backends, num_devices
from tests.deepserve.same_tokens.find_prompts import DATA
from tests.deepserve.serving import WAIT_S
from tests.deepserve.test_many_ranks import CASES, MIN_MARGIN, MOVING, TOLERANCE, generate, logprobs

DEVICES = [name for name in available_backends() if name != "cpu" and num_devices(name) >= 2]
pytestmark = pytest.mark.skipif(not DEVICES, reason="needs two accelerators")
PROMPTS = json.loads(DATA.read_text())

COMMON = {"dtype": "float32", "num_pages": 40, "max_model_len": 1024, "max_num_seqs": 12, "max_dispatch_tokens_per_rank": 16}
DP2, TP2 = {"data_parallel_size": 2}, {"tensor_parallel_size": 2}
PLAIN = {"graphs": False, "async_scheduling": False}
OVERLAPPED = {"enable_dbo": True, "dbo_prefill_token_threshold": 1, "dbo_decode_token_threshold": 2}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
LAYOUTS = {
    "dp2": {**DP2, "max_num_batched_tokens": 64},
    "dp2, plain": {**DP2, **PLAIN},
    "dp2, throughput": {**DP2, "max_dispatch_tokens_per_rank": 1},
    "tp2": {**TP2, "max_num_batched_tokens": 64},
    "tp2, plain": {**TP2, **PLAIN},
    "dp2, overlapped": {**DP2, **OVERLAPPED, "max_dispatch_tokens_per_rank": 8},
    "tp2, overlapped, drafts": {**TP2, **OVERLAPPED, **MTP},
    "dp2, drafts": {**DP2, **MTP},
    "dp2, experts move": {**DP2, **MTP, **MOVING},
    "tp2, experts move": {**TP2, **PLAIN, **MOVING},
    "tp2, drafts": {**TP2, **MTP, "async_scheduling": False},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_greedy_tokens_are_the_references(device: str, layout: str):
    """With log-probabilities, which are worked out behind a recorded step, and without, when draws are part of it."""
    prompts = [case["prompt_ids"] for case in CASES]
    with LLM(device=device, **{**COMMON, **LAYOUTS[layout]}) as llm:
        for wanted in (0, None):
            lengths = [32 if wanted == 0 else 1 + 5 * i % 31 for i in range(len(CASES))]
            params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=wanted) for length in lengths]
            for case, length, output in zip(CASES, lengths, generate(llm, prompts, params), strict=True):
                clear = next((i for i, margin in enumerate(case["margin"][:length]) if margin < MIN_MARGIN), length)
                assert output.outputs[0].token_ids[:clear] == case["output_ids"][:clear], case["name"]
                if wanted is not None:
                    (found,) = logprobs(output)
                    assert found[:clear] == pytest.approx(case["logprobs"][:clear], abs=TOLERANCE), case["name"]
        if "move" in layout:
            assert any(load.num_moved_experts > 0 for load in llm.engine.loads.values())


@pytest.mark.parametrize("device", DEVICES)
def test_draws_are_those_of_the_cpu(device: str):
    """Same noise, nearly the same logits: for these seeds no token comes near to changing."""
    settings = [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"presence_penalty": 1.0}]
    prompts = [case["prompt_ids"] for case in CASES[:10]]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, seed=i, n=2, **settings[i % len(settings)]) for i in range(len(prompts))]
    found = []
    for options in ({}, {"device": device, **DP2}, {"device": device, **TP2}):
        with LLM(**{**COMMON, **options}) as llm:
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            found.append([[sequence.token_ids for sequence in output.outputs] for output in outputs])
    assert found[1] == found[0] and found[2] == found[0]


@pytest.mark.parametrize("options", [DP2, TP2], ids=["dp2", "tp2"])
@pytest.mark.parametrize("kind", ["v2", "v3"])
@pytest.mark.parametrize("device", DEVICES)
def test_tiny_models(device: str, kind: str, options: dict, tiny_model: Callable[..., Path]):
    cases = PROMPTS[kind]["cases"]
    params = [SamplingParams(temperature=0, max_tokens=len(case["output"]), ignore_eos=True) for case in cases]
    folder = tiny_model(kind, PROMPTS[kind]["seed"])
    with LLM(str(folder), skip_tokenizer_init=True, device=device, **{**COMMON, "max_model_len": 192, **options}) as llm:
        for case, output in zip(cases, generate(llm, [case["prompt"] for case in cases], params), strict=True):
            assert output.outputs[0].token_ids == case["output"]


@pytest.mark.parametrize("options", [DP2, TP2], ids=["dp2", "tp2"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_that_is_killed_is_named_and_nothing_is_left(device: str, options: dict):
    """Kernels of the other rank wait for it and would wait for ever."""
    llm = LLM(device=device, **{**COMMON, **options})
    try:
        pids = llm.engine.pids
        prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in CASES]
        params = SamplingParams(max_tokens=600, ignore_eos=True)
        threading.Timer(1.0, lambda: psutil.Process(pids[1]).kill()).start()
        with ThreadPoolExecutor(1) as pool, pytest.raises(RankLost, match=r"rank 1 .*SIGKILL"):
            pool.submit(llm.generate, prompts, params, use_tqdm=False).result(WAIT_S)
    finally:
        started = time.monotonic()
        llm.shutdown()
    assert time.monotonic() - started < 20.0
    assert not any(psutil.pid_exists(pid) for pid in pids)
