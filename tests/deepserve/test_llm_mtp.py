"""Speculative decoding as users see it: text, stop strings and counts are those of a model without it."""

import re

import httpx
import pytest

from deepserve import LLM, SamplingParams
from tests.deepserve.engine.drafting import tell_drafts
from tests.deepserve.serving import Served

DRAFTS = {"num_speculative_tokens": 8, "adaptive": False}
ARGS = {"dtype": "float32", "max_model_len": 512, "num_threads": 1}
PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def plain() -> LLM:
    with LLM(**ARGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting() -> LLM:
    with LLM(speculative_config=DRAFTS, **ARGS) as llm:
        yield llm


def answer(llm: LLM, **params):
    (output,) = llm.generate(PROMPT, SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}), use_tqdm=False)
    return output


@pytest.fixture(scope="module")
def told(plain: LLM, drafting: LLM) -> list[int]:
    """Every draft is right from here on: after the first token come nine in one step. Returns the answer's tokens."""
    output = answer(plain)
    tokens = output.outputs[0].token_ids
    tell_drafts(drafting.engine, [*output.prompt_token_ids, *tokens])
    before = drafting.engine.load()
    assert answer(drafting).outputs == output.outputs
    after = drafting.engine.load()
    assert after.num_accepted_tokens - before.num_accepted_tokens == 9 and after.num_steps - before.num_steps == 3
    return tokens


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("place", range(10))
def test_stop_string_at_every_place_of_a_run(plain: LLM, drafting: LLM, told: list[int], place: int, include: bool):
    text = plain.tokenizer.decode(told)
    ends = [len(plain.tokenizer.decode(told[: i + 1])) for i in range(len(told))]
    stop = text[max(0, ends[place] - 3) : ends[place]]
    params = {"stop": [stop], "include_stop_str_in_output": include, "logprobs": 1}
    found, wanted = answer(drafting, **params).outputs[0], answer(plain, **params).outputs[0]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    assert found.token_ids == wanted.token_ids and len(found.token_ids) <= place + 1
    assert (found.text, found.finish_reason, found.stop_reason) == (wanted.text, wanted.finish_reason, wanted.stop_reason)
    assert [list(at) for at in found.logprobs] == [list(at) for at in wanted.logprobs]
    assert drafting.engine.load().num_running == 0


def test_unknown_options_of_the_config_are_refused():
    with pytest.raises(ValueError, match="unknown field `tokens`"):
        LLM(speculative_config={"method": "mtp", "tokens": 2})


def test_a_server_drafts_and_counts(plain: LLM):
    """Over HTTP: the answer and its usage are those without drafts, and /metrics says how many drafts there were."""
    config = '{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}'
    messages = [{"role": "user", "content": "What is 123+456? Think step by step."}]
    params = SamplingParams(temperature=0.0, max_tokens=60)
    (wanted,) = plain.chat(messages, params, use_tqdm=False)
    with Served("--dtype", "float32", "--max-model-len", "512", "--num-threads", "1", "--speculative-config", config) as server:
        body = {"model": "deepserve-tiny", "messages": messages, "temperature": 0, "max_tokens": 60}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    num_tokens = len(wanted.outputs[0].token_ids)
    assert answer["choices"][0]["message"]["content"] == wanted.outputs[0].text
    assert answer["usage"]["completion_tokens"] == num_tokens
    found = dict(re.findall(r"^vllm:spec_decode_(\w+)_total\{.*\} (\S+)$", metrics, re.M))
    num_drafts, num_accepted = float(found["num_drafts"]), float(found["num_accepted_tokens"])
    assert num_drafts <= float(found["num_draft_tokens"]) <= 2 * num_drafts
    # The first token is nobody's draft's; at most one step's worth lies behind the end.
    assert 0 <= 1 + num_drafts + num_accepted - num_tokens <= 2 and num_accepted > num_drafts / 2
