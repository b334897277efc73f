"""Prefill on one engine and decode on another give what one engine gives: the shipped model, over NIXL, in one process."""

import pytest
import torch

from deepserve.config import SpeculativeConfig
from deepserve.pd.messages import Prefill, Reservation
from tests.deepserve.engine.driving import Request, golden_cases, make_engine, run_alone
from tests.deepserve.engine.world import Story
from tests.deepserve.pd.pair import Pair

SHARED = {"batch_invariant": True, "cpu_kernels": "torch", "num_pages": 60, "max_num_seqs": 6}
DRAFTS = SpeculativeConfig(num_speculative_tokens=2, adaptive=False)
# Chunks of a prompt end inside pages and at their ends; sequences are preempted; steps overlap; drafts are made and verified.
CASES = {
    "plain": {},
    "chunks, asynchronous": {"max_num_batched_tokens": 40, "async_scheduling": True},
    "chunks of whole pages, drafts": {"max_num_batched_tokens": 64, "speculative_config": DRAFTS},
    "captured, drafts, asynchronous": {"speculative_config": DRAFTS, "async_scheduling": True, "graphs": True},
}
SHORT = "chunks, asynchronous", "captured, drafts, asynchronous"


@pytest.fixture(scope="module")
def expected() -> tuple[list[Request], list[Story]]:
    """Requests, and what one engine makes of each alone."""
    prompts = [case["prompt_ids"] for case in golden_cases()[::6]]
    long = (prompts[0] * 60)[:200]
    requests = [Request(prompt, {"temperature": 0.0, "max_tokens": 16, "logprobs": 2}) for prompt in prompts]
    requests += [
        Request(long, {"temperature": 1.0, "seed": 5, "max_tokens": 24, "top_p": 0.9, "logprobs": 1}),
        Request(long[:64], {"temperature": 0.0, "max_tokens": 9, "prompt_logprobs": 1, "frequency_penalty": 0.5}),
        Request(long[:128], {"temperature": 1.0, "seed": 9, "max_tokens": 12, "n": 3}),
        Request(long[:65], {"temperature": 0.0, "max_tokens": 1}),
        Request([*long[:150], 7, 8, 9], {"temperature": 0.8, "seed": 1, "max_tokens": 20, "min_tokens": 12}),
    ]
    engine = make_engine(**{**SHARED, "enable_prefix_caching": False})
    return requests, run_alone(engine, requests)


@pytest.mark.parametrize("case", [case if case in SHORT else pytest.param(case, marks=pytest.mark.long) for case in CASES])
def test_same_tokens(expected, case):
    requests, wanted = expected
    pair = Pair(make_engine(**SHARED, **CASES[case]), make_engine(**SHARED, **CASES[case]))
    for i, request in enumerate(requests):
        pair.submit(f"r{i}", request.prompt, **request.params)
    pair.run()
    pair.close()
    found = [pair.stories[f"r{i}", index] for i, request in enumerate(requests) for index in range(request.params.get("n", 1))]
    for story in found:
        story.num_cached_tokens = 0
    assert found == wanted
    assert not pair.given_up


def test_prefixes_are_found_on_both_sides(expected):
    requests, wanted = expected
    prompt = requests[-5].prompt
    pair = Pair(*(make_engine(**SHARED, speculative_config=DRAFTS) for _ in range(2)))

    def ask(request_id: str, **params) -> tuple[int, int, Story]:
        """Tokens that decode had, pages that were sent, and the story."""
        pair.seen.clear()
        pair.submit(request_id, prompt, **requests[-5].params)
        pair.run()
        reservation = next(message for message in pair.seen if isinstance(message, Reservation))
        return reservation.num_cached_tokens, len(reservation.pages), pair.stories[request_id, 0]

    assert ask("first")[:2] == (0, 4)
    there, here = (side.engine.pages._published for side in pair.sides.values())
    assert len(there) == 3
    for digest, (page, _) in there.items():
        caches = zip(pair.prefill.engine.runner.caches, pair.decode.engine.runner.caches, strict=True)
        assert [torch.equal(mine[page], theirs[here[digest][0]]) for mine, theirs in caches] == [True] * 7  # the MTP module's too
    cached, num_sent, story = ask("second")
    assert (cached, num_sent, story.num_cached_tokens) == (192, 1, 192)
    pair.prefill.engine.pages.forget_cached()
    cached, num_sent, story = ask("third")
    assert (cached, num_sent, story.num_cached_tokens) == (192, 1, 0)
    pair.decode.engine.pages.forget_cached()
    cached, num_sent, story = ask("fourth")
    assert (cached, num_sent, story.num_cached_tokens) == (0, 4, 192)
    pair.close()
    for request_id in ("first", "second", "third", "fourth"):
        found = pair.stories[request_id, 0]
        assert (found.tokens, found.logprobs) == (wanted[-7].tokens, wanted[-7].logprobs)


def test_engines_with_other_layers_refuse_each_other():
    pair = Pair(make_engine(**SHARED), make_engine(**SHARED, num_speculative_tokens=1))
    attempt = pair.submit("r", [5, 6, 7])
    pair.run()
    pair.close()
    assert any(isinstance(message, Prefill) for message in pair.seen)
    assert "has pages of" in pair.given_up[attempt]
