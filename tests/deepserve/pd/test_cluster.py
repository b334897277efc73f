"""Prefill over TP ranks, decode over DP ranks, each a process: the same tokens, and what becomes of pages when an instance is killed."""

import time

import pytest

from deepserve.config import SpeculativeConfig
from deepserve.messages import Place
from deepserve.pd.messages import Attempt, GiveUp, HandOff, Progress
from tests.deepserve.engine.driving import Request, golden_cases, make_engine, run_alone
from tests.deepserve.pd.cluster import Cluster

SHARED = {"batch_invariant": True, "cpu_kernels": "torch", "num_pages": 60, "max_num_seqs": 8, "max_num_batched_tokens": 128}
PREFILL, DECODE = Place("prefill", 0), [Place("decode", 0), Place("decode", 1)]
LEASE_S = 2.0

pytestmark = pytest.mark.long  # tests/launch/test_pd.py has the same with a real frontend; here are layouts, and exact counts


@pytest.mark.parametrize(
    ("num_drafts", "layouts"), [(0, ((2, 1), (1, 2))), (2, ((2, 1), (1, 2))), (2, ((1, 2), (2, 1))), (2, ((2, 1), (2, 1)))]
)
def test_same_tokens(num_drafts, layouts):
    """layouts: (tp, dp) of prefill and of decode."""
    args = dict(SHARED, speculative_config=SpeculativeConfig(num_speculative_tokens=num_drafts) if num_drafts else None)
    cases = golden_cases()[::4]
    requests = [Request(case["prompt_ids"], {"temperature": 0.0, "max_tokens": 10, "logprobs": 1}) for case in cases]
    long = (cases[0]["prompt_ids"] * 100)[:300]
    requests += [Request(long[:length], {"seed": length, "max_tokens": 10, "logprobs": 1}) for length in (64, 200, 200, 300)]
    with Cluster(**args) as cluster:
        (prefill_tp, prefill_dp), (decode_tp, decode_dp) = layouts
        prefills = [Place("prefill", dp) for dp in range(prefill_dp)]
        decodes = [Place("decode", dp) for dp in range(decode_dp)]
        cluster.start("prefill", "prefill", tp=prefill_tp, dp=prefill_dp)
        cluster.start("decode", "decode", tp=decode_tp, dp=decode_dp)
        cluster.wait_for(*prefills, *decodes)
        for i, request in enumerate(requests):
            cluster.submit(f"r{i}", request.prompt, prefills[i % prefill_dp], decodes[i % decode_dp], **request.params)
        cluster.finish(*(f"r{i}" for i in range(len(requests))))
        cluster.settle(*prefills, *decodes)
        assert not cluster.given_up
        found = [cluster.stories[f"r{i}", 0] for i in range(len(requests))]
    wanted = run_alone(make_engine(**SHARED), requests)
    assert [(story.tokens, story.finish_reason) for story in found] == [(story.tokens, story.finish_reason) for story in wanted]
    for mine, theirs in zip(found, wanted, strict=True):  # sums over TP ranks round otherwise
        assert [at.logprobs[0] for at in mine.logprobs] == pytest.approx([at.logprobs[0] for at in theirs.logprobs], abs=1e-3)


def test_pages_come_back_when_an_instance_is_killed_and_stays_away():
    prompt = [5 + i % 1000 for i in range(3700)]
    slow = {**SHARED, "max_num_batched_tokens": 32}

    def half_way(request_id: str) -> Attempt:
        """Begin a long prompt, and wait until some of it is written."""
        attempt = cluster.submit(request_id, prompt, PREFILL, DECODE[0])
        cluster.until(lambda: any(progress.num_tokens > 0 for progress in cluster.heard(Progress, attempt)))
        assert not cluster.heard(HandOff, attempt)
        return attempt

    with Cluster(lease_s=LEASE_S, **slow) as cluster:
        cluster.start("prefill", "prefill")
        cluster.start("decode", "decode", tp=2)
        cluster.wait_for(PREFILL, DECODE[0])
        attempt = half_way("a")
        cluster.kill("prefill")
        killed_s = time.monotonic()
        cluster.settle(DECODE[0])
        assert time.monotonic() - killed_s < LEASE_S + 5.0
        assert "nothing came from prefill" in cluster.heard(GiveUp, attempt)[0].error
        cluster.start("prefill", "prefill")
        cluster.wait_for(PREFILL)
        cluster.submit("b", prompt[:100], PREFILL, DECODE[0])
        cluster.finish("b")

        attempt = half_way("c")
        cluster.kill("decode")
        cluster.settle(PREFILL)
        assert "the hand-off failed: a write to decode." in cluster.heard(GiveUp, attempt)[0].error
        cluster.start("decode", "decode")
        cluster.wait_for(DECODE[0])
        cluster.submit("d", prompt[:100], PREFILL, DECODE[0])
        cluster.finish("d")
        cluster.settle(PREFILL, DECODE[0])
        assert cluster.stories["b", 0].tokens == cluster.stories["d", 0].tokens
