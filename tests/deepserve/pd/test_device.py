"""Hand-offs between processes whose pages are in device memory: the shipped model's tokens, and pages of a dead writer. Needs NIXL."""

import time

import pytest

from deepserve.config import SpeculativeConfig
from deepserve.messages import Place
from deepserve.pd.messages import HandOff, Progress
from hw.testing import available_backends
from tests.deepserve.engine.driving import Request, golden_cases, make_engine, run_alone
from tests.deepserve.pd.cluster import Cluster

PREFILL, DECODE = Place("prefill", 0), Place("decode", 0)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_same_tokens(num_drafts):
    device = next(name for name in available_backends() if name != "cpu")
    shared = {"device": device, "dtype": "float32", "num_pages": 200, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    drafts = SpeculativeConfig(num_speculative_tokens=num_drafts, adaptive=False) if num_drafts else None
    cases = golden_cases()
    long = (cases[0]["prompt_ids"] * 500)[:2000]
    prompts = [*(case["prompt_ids"] for case in cases), long[:64], long[:200], long[:200], long]
    requests = [Request(prompt, {"temperature": 0.0, "max_tokens": 16, "logprobs": 1}) for prompt in prompts]
    with Cluster(**shared, speculative_config=drafts) as cluster:
        cluster.start("prefill", "prefill")
        cluster.start("decode", "decode")
        cluster.wait_for(PREFILL, DECODE)
        for i, request in enumerate(requests):
            cluster.submit(f"r{i}", request.prompt, PREFILL, DECODE, **request.params)
        cluster.finish(*(f"r{i}" for i in range(len(requests))))
        cluster.settle(PREFILL, DECODE)
        assert not cluster.given_up
        assert (cluster.loads[DECODE].num_accepted_tokens > 0) == bool(num_drafts)
        found = [cluster.stories[f"r{i}", 0] for i in range(len(requests))]
    wanted = run_alone(make_engine(**shared), requests)
    assert [(story.tokens, story.finish_reason) for story in found] == [(story.tokens, story.finish_reason) for story in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        assert [at.logprobs[0] for at in mine.logprobs] == pytest.approx([at.logprobs[0] for at in theirs.logprobs], abs=1e-3)


def test_pages_come_back_from_a_killed_writer_and_are_used_again():
    """Writers of this machine copy between devices by themselves, so their end is waited for; then a second transfer serves."""
    device, lease_s = next(name for name in available_backends() if name != "cpu"), 1.5
    shared = {"device": device, "dtype": "float32", "num_pages": 60, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    long = [5 + i % 1000 for i in range(3700)]
    with Cluster(lease_s=lease_s, **shared) as cluster:
        cluster.start("prefill", "prefill")
        cluster.start("decode", "decode")
        cluster.wait_for(PREFILL, DECODE)
        cluster.submit("warm", long[:300], PREFILL, DECODE)
        cluster.finish("warm")
        cluster.settle(DECODE)
        attempt = cluster.submit("long", long, PREFILL, DECODE)
        cluster.until(lambda: any(progress.num_tokens > 0 for progress in cluster.heard(Progress, attempt)))
        assert not cluster.heard(HandOff, attempt)
        cluster.kill("prefill")
        killed_s = time.monotonic()
        cluster.settle(DECODE)
        assert time.monotonic() - killed_s < lease_s + 5.0
        cluster.start("prefill", "prefill")
        cluster.wait_for(PREFILL)
        cluster.submit("again", [7, *long[1:300]], PREFILL, DECODE)
        cluster.finish("again")
        cluster.submit("warm again", long[:300], PREFILL, DECODE)
        cluster.finish("warm again")
        assert cluster.stories["warm again", 0].tokens == cluster.stories["warm", 0].tokens
