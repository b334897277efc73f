"""Pages between the memories of accelerators: a prefill and a decode instance that share one, and the reference's log-probabilities."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from hw.testing import available_backends
from tests.deepserve.test_many_ranks import CASES, MIN_MARGIN, TOLERANCE
from tests.launch.test_pd import ask, hand_offs, pages
from tests.launch.test_up import Cluster, wait_until

DEVICES = [name for name in available_backends() if name != "cpu"]
FILE = """
[hand_off]
max_local_prefill_tokens = 0
[engine]
device = "DEVICE"
dtype = "float32"
max_model_len = 1024
max_num_seqs = 12
num_pages = 400
memory_utilization = 0.4
DRAFTS
[[prefill]]
rdzv_port = RDZV
[[decode]]
rdzv_port = RDZV
"""
LENGTH = 32


@pytest.mark.parametrize("drafts", ["", "num_speculative_tokens = 2"], ids=["plain", "with drafts"])
@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_are_the_references(device: str, drafts: str, tmp_path):
    with Cluster(tmp_path, FILE.replace("DEVICE", device).replace("DRAFTS", drafts)) as server:
        with ThreadPoolExecutor(12) as pool:
            replies = list(pool.map(lambda case: ask(server, case["prompt_ids"], LENGTH, logprobs=0).json(), CASES))
        for case, reply in zip(CASES, replies, strict=True):
            clear = next((i for i, margin in enumerate(case["margin"][:LENGTH]) if margin < MIN_MARGIN), LENGTH)
            found = reply["choices"][0]["logprobs"]["token_logprobs"]
            assert found[:clear] == pytest.approx(case["logprobs"][:clear], abs=TOLERANCE), case["name"]
        assert hand_offs(server, "taken") == len(CASES)
        wait_until(lambda: not any(pages(server)[state] for state in ("held", "in_transfer", "quarantined")), "pages are back")
