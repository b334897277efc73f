"""The whole engine on the shipped model, against what transformers computed, and against itself where two ways must agree."""

import pytest

from deepserve.engine import runner
from tests.deepserve.engine.driving import Request, Story, golden_cases, make_engine, run_alone, run_together

TOLERANCE = 1e-3


def golden_requests() -> list[Request]:
    params = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 0}
    return [Request(case["prompt_ids"], params) for case in golden_cases()]


def check_case(case: dict, story: Story) -> None:
    # Behind the first small lead another choice would be no error, and all that follows would differ.
    num_sure = next((i for i, margin in enumerate(case["margin"]) if margin <= TOLERANCE), len(case["margin"]))
    assert num_sure > 8, "the case proves too little"
    assert story.tokens[:num_sure] == case["output_ids"][:num_sure], case["name"]
    assert len(story.tokens) == 32 and story.finish_reason == "length"
    for position, token, logprob in zip(story.logprobs[:num_sure], case["output_ids"], case["logprobs"], strict=False):
        assert position.token_ids == [token, token] and position.rank == 1
        assert position.logprobs[0] == pytest.approx(logprob, abs=TOLERANCE), case["name"]
    assert story.prompt_logprobs[0] is None and len(story.prompt_logprobs) == len(case["prompt_ids"])
    for position, token, logprob in zip(story.prompt_logprobs[1:], case["prompt_ids"][1:], case["prompt_logprobs"], strict=True):
        assert position.token_ids == [token]
        assert position.logprobs[0] == pytest.approx(logprob, abs=TOLERANCE), case["name"]


@pytest.mark.parametrize("args", [{}, {"max_num_batched_tokens": 100}, {"batch_invariant": True}], ids=["plain", "chunked", "invariant"])
def test_golden_values_in_one_batch(args):
    cases = golden_cases()
    stories = run_together(make_engine(**args), golden_requests())
    assert len(stories) == len(cases) == 21
    for case, story in zip(cases, stories, strict=True):
        check_case(case, story)


def test_the_end_token_and_stop_tokens_end():
    engine = make_engine()
    cases = {case["name"]: case for case in golden_cases()}
    hello, text = cases["hello"], cases["text"]
    stop = text["output_ids"][5]
    first = text["output_ids"].index(stop)
    ended, stopped, kept = run_together(
        engine,
        [
            Request(hello["prompt_ids"], {"max_tokens": 32, "temperature": 0.0}),
            Request(text["prompt_ids"], {"max_tokens": 32, "temperature": 0.0, "stop_token_ids": [stop]}),
            Request(hello["prompt_ids"], {"max_tokens": 32, "temperature": 0.0, "min_tokens": 12}),
        ],
    )
    assert ended.tokens == hello["output_ids"][: hello["eos_at"] + 1]
    assert (ended.finish_reason, ended.stop_token_id) == ("stop", 1)
    assert stopped.tokens == text["output_ids"][: first + 1]
    assert (stopped.finish_reason, stopped.stop_token_id) == ("stop", stop)
    # Where the end stood something else must stand, and before it nothing changes.
    assert kept.tokens[: hello["eos_at"]] == hello["output_ids"][: hello["eos_at"]]
    assert len(kept.tokens) > 12 and 1 not in kept.tokens[:12]


def test_generated_text_scored_as_a_prompt():
    engine = make_engine(batch_invariant=True)
    prompts = [case["prompt_ids"] for case in golden_cases()[:8]]
    params = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True, "logprobs": 3}
    drawn = run_together(engine, [Request(prompt, {**params, "seed": i}) for i, prompt in enumerate(prompts)])
    scoring = {"max_tokens": 0, "prompt_logprobs": 3}
    scored = run_together(engine, [Request(prompt + story.tokens, scoring) for prompt, story in zip(prompts, drawn, strict=True)])
    for prompt, story, score in zip(prompts, drawn, scored, strict=True):
        assert score.tokens == [] and score.finish_reason == "length"
        assert score.prompt_logprobs[len(prompt) :] == story.logprobs  # bitwise: tokens, values and ranks


def test_prompt_logprobs_do_not_depend_on_tiles(monkeypatch):
    engine = make_engine(batch_invariant=True, max_num_batched_tokens=50)
    prompts = [case["prompt_ids"] for case in golden_cases() if 30 < len(case["prompt_ids"]) < 200]
    requests = [Request(prompt, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 2}) for prompt in prompts]
    whole = run_together(engine, requests)
    monkeypatch.setattr(runner, "PROMPT_TILE", 7)
    assert run_together(engine, requests) == whole


def test_a_ban_of_a_quarter_of_the_vocabulary():
    engine = make_engine()
    params = {"max_tokens": 3, "min_tokens": 3, "seed": 1}
    bans = [list(range(first, first + 1024)) for first in (0, 1024, 2048, 3072)]
    stories = run_alone(engine, [Request([0, 5], {**params, "stop_token_ids": ban}) for ban in bans])
    assert all(len(story.tokens) == 3 and not set(story.tokens) & set(ban) for story, ban in zip(stories, bans, strict=True))
