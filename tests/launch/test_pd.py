"""Prefill TP2 and decode DP2 of the shipped model, started by `launch up`: the tokens are right, and pages return whoever dies."""

import json
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import httpx
import psutil
import pytest

from deepserve.model.hub import SHIPPED_FOLDER
from deepserve.text.tokenizer import Tokenizer
from tests.deepserve.same_tokens.find_prompts import DATA, SHIPPED
from tests.deepserve.serving import WAIT_S
from tests.launch.test_up import Cluster, is_ready, num_engines, wait_until

LEASE_S = 4.0
LEAVE_S = 5.0  # in which a dead instance leaves routing
BOUND_S = LEASE_S + 5.0  # in which clients are told and pages are back
REPORT_S = 1.5  # until a rank's pages are seen here
FILE = f"""
lease_s = {LEASE_S}
[hand_off]
lease_s = {LEASE_S}
max_local_prefill_tokens = 0
[engine]
max_model_len = 2048
num_threads = 1
num_pages = 256
dtype = "float32"
DRAFTS
[[prefill]]
tp = 2
rdzv_port = RDZV
[[decode]]
dp = 2
rdzv_port = RDZV
engine = {{ on_rank_death = "replan" }}
"""
# Whose tokens no rounding changes (tests/deepserve/test_same_tokens.py), with those that transformers gives them.
CASES = json.loads(DATA.read_text())[SHIPPED]["cases"]
DRAFTS = [
    "",
    pytest.param("num_speculative_tokens = 2", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=DRAFTS, ids=["plain", "with drafts"])
def cluster(request, tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("pd"), FILE.replace("DRAFTS", request.param)) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> list[str]:
    tokenizer = Tokenizer.from_folder(SHIPPED_FOLDER)
    return [tokenizer.decode(case["output"], skip_special_tokens=True) for case in CASES]


def ask(server: Cluster, prompt: list[int], num_tokens: int = 10, **fields) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=WAIT_S)


def pages(server: Cluster, instance: str = "") -> dict[str, int]:
    """By state, over all ranks of an instance, or over all that registered."""
    pattern = rf'^deepserve:kv_cache_pages\{{engine="{instance}.*state="(\w+)"\}} (\S+)$'
    found = re.findall(pattern, httpx.get(server.url + "/metrics").text, re.MULTILINE)
    return {name: sum(int(float(value)) for state, value in found if state == name) for name, _ in found}


def wait_for_balance(server: Cluster) -> None:
    """Every page of every rank is free or cached; reports are a second old at most."""
    wait_until(lambda: is_ready(server.url), "ready")

    def balanced() -> bool:
        now = pages(server)
        return now["free"] + now["cached"] == 3 * 256 and not (now["held"] or now["in_transfer"] or now["quarantined"])

    wait_until(balanced, f"every page is free or cached: {pages(server)}")


def pids_of(server: Cluster, instance: str) -> dict[int, int]:
    """Process of each DP rank, the latest one, by what the frontend said when they joined."""
    text = "\n".join(server.lines)
    return {int(dp): int(pid) for dp, pid in re.findall(rf"engine '{instance}' rank (\d+) \(pid (\d+)\) joined", text)}


def hand_offs(server: Cluster, result: str) -> int:
    return count(server, rf'hand_offs_total\{{.*result="{result}"\}}')


def num_retried(server: Cluster) -> int:
    return count(server, r"requests_retried_total\{.*\}")


def count(server: Cluster, pattern: str) -> int:
    """Of a metric of ours, summed over its labels."""
    found = re.findall(rf"^deepserve:{pattern} (\S+)$", httpx.get(server.url + "/metrics").text, re.MULTILINE)
    return sum(int(float(value)) for value in found)


def test_tokens_are_those_of_the_model(cluster, expected):
    before = hand_offs(cluster, "taken")
    with ThreadPoolExecutor(len(CASES)) as pool:
        first, second = (list(pool.map(lambda case: ask(cluster, case["prompt"]).json(), CASES)) for _ in range(2))
    assert [reply["choices"][0]["text"] for reply in first] == expected == [reply["choices"][0]["text"] for reply in second]
    assert hand_offs(cluster, "taken") - before == 2 * len(CASES), "all were handed off"
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in second]
    assert cached == [(len(case["prompt"]) - 1) // 64 * 64 for case in CASES], "prefill computed them before"
    wait_for_balance(cluster)


def test_two_hundred_at_once(cluster, expected):
    """Each with a cache of its own, so that all is computed and sent."""

    def one(number: int) -> str:
        reply = ask(cluster, CASES[number % len(CASES)]["prompt"], cache_salt=f"salt {number}")
        return reply.json()["choices"][0]["text"]

    with ThreadPoolExecutor(200) as pool:
        assert list(pool.map(one, range(200))) == [expected[number % len(CASES)] for number in range(200)]
    wait_for_balance(cluster)


def test_what_clients_ask_for_beside_tokens(cluster, expected):
    case = CASES[-1]
    body = ask(cluster, case["prompt"], n=3, logprobs=2, echo=True, seed=5).json()
    assert [choice["text"].endswith(expected[-1]) for choice in body["choices"]] == [True] * 3
    logprobs = [choice["logprobs"]["token_logprobs"] for choice in body["choices"]]
    assert len(logprobs[0]) == len(case["prompt"]) + 10 and logprobs[0][0] is None
    assert all(logprobs[0][1:] == pytest.approx(others[1:], abs=1e-3) for others in logprobs[1:])
    sampled = {"temperature": 1.0, "seed": 11, "n": 2}
    texts = [[choice["text"] for choice in ask(cluster, case["prompt"], **sampled).json()["choices"]] for _ in range(2)]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
    scored = ask(cluster, case["prompt"], 0, echo=True, logprobs=0).json()
    assert scored["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(logprobs[0][1 : len(case["prompt"])], abs=1e-3)


def test_clients_that_leave(cluster):
    """In whatever phase: none of it stays."""
    body = {"max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}

    def leave(number: int) -> None:
        timeout = httpx.Timeout(WAIT_S, read=0.02 * (number + 1))
        try:
            prompt = [5 + number, *range(100, 1500)]
            with httpx.stream("POST", cluster.url + "/v1/completions", json={**body, "prompt": prompt}, timeout=timeout) as reply:
                next(reply.iter_lines())
        except httpx.ReadTimeout:
            return

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(leave, range(12)))
    wait_for_balance(cluster)


class Askers:
    """Requests under way, each of which ends with the right answer or with an error."""

    def __init__(self, server: Cluster, num: int, num_tokens: int):
        self._pool = ThreadPoolExecutor(num)
        self._begun_s = time.monotonic()
        self._futures: list[Future] = [self._pool.submit(self._one, server, number, num_tokens) for number in range(num)]

    def _one(self, server: Cluster, number: int, num_tokens: int) -> tuple[int, str, float]:
        try:
            reply = ask(server, CASES[number % len(CASES)]["prompt"], num_tokens, cache_salt=f"{self._begun_s} {number}")
        except httpx.TransportError as error:
            return 0, str(error), time.monotonic()
        text = reply.json()["choices"][0]["text"] if reply.status_code == 200 else reply.json()["error"]["message"]
        return reply.status_code, text, time.monotonic()

    def told_in_time(self, server: Cluster, fault_s: float) -> list[tuple[int, str, float]]:
        """How they end. Who hears of an error does so within the bound, and so is everybody sent elsewhere who is."""
        wait(self._futures, fault_s + BOUND_S - time.monotonic())
        num_in_time = num_retried(server)
        answers = self.end()
        assert num_retried(server) == num_in_time, "somebody waited for longer"
        late = [(ended_s - fault_s, text) for status, text, ended_s in answers if status != 200 and ended_s - fault_s > BOUND_S]
        assert not late
        return answers

    def end(self) -> list[tuple[int, str, float]]:
        """Status (0 for a broken connection), text or message, and when it came."""
        found = wait(self._futures, WAIT_S)
        assert not found.not_done, "a client waits for ever"
        self._pool.shutdown()
        return [future.result() for future in self._futures]


def pages_return(server: Cluster, instance: str, fault_s: float) -> None:
    """To an instance that lives, from hand-offs with one that does not, and whether or not that one comes back."""

    def returned() -> bool:
        now = pages(server, instance)
        return not (now["held"] or now["in_transfer"] or now["quarantined"])

    wait_until(returned, f"pages are back: {pages(server, instance)}", max(0.0, fault_s + BOUND_S + REPORT_S - time.monotonic()))


def begin(server: Cluster, num: int, num_tokens: int) -> Askers:
    """Some of them have been handed off and some have not."""
    assert ask(server, CASES[0]["prompt"], 2).status_code == 200  # shows that hand-offs succeed, whatever happened before
    before = hand_offs(server, "taken")
    askers = Askers(server, num, num_tokens)
    wait_until(lambda: hand_offs(server, "taken") > before, "the first is handed off")
    return askers


def check_answers(answers: list[tuple[int, str, float]], expected: list[str]) -> None:
    for number, (status, text, _) in enumerate(answers):
        assert status in (500, 503) or (status == 200 and text.startswith(expected[number % len(CASES)])), (status, text)


def test_a_killed_prefill_rank_costs_nobody_an_answer(cluster, expected):
    """What it had not handed over is computed by decode ranks; what it had, goes on."""
    askers = begin(cluster, 40, 12)
    (rank, *_) = cluster.ranks("prefill0")
    rank.kill()
    killed_s = time.monotonic()
    wait_until(lambda: num_engines(cluster) == 2, "out of routing", LEAVE_S)
    answers = askers.told_in_time(cluster, killed_s)
    assert [status for status, _, _ in answers] == [200] * 40, {text for status, text, _ in answers if status != 200}
    check_answers(answers, expected)
    wait_for_balance(cluster)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_decode_rank_ends_only_what_had_begun_there(cluster, expected, victim: int):
    """The other one goes on, with hand-offs that are under way too, and takes what had not begun; the dead one comes back."""
    wait_for_balance(cluster)
    pids = pids_of(cluster, "decode0")
    askers = begin(cluster, 24, 150)
    psutil.Process(pids[victim]).kill()
    killed_s = time.monotonic()
    wait_until(lambda: num_engines(cluster) < 3, "out of routing", LEAVE_S)
    answers = askers.told_in_time(cluster, killed_s)
    check_answers(answers, expected)
    failed = [text for status, text, _ in answers if status != 200]
    assert len(failed) <= 12 and all(f"(pid {pids[victim]})" in text for text in failed), failed
    pages_return(cluster, "prefill0", killed_s)
    wait_for_balance(cluster)
    assert ask(cluster, CASES[0]["prompt"]).json()["choices"][0]["text"] == expected[0]
    now = pids_of(cluster, "decode0")
    assert now[1 - victim] == pids[1 - victim] and now[victim] != pids[victim]


@pytest.mark.long
@pytest.mark.parametrize("which", [slice(None), slice(1, None)], ids=["all", "one that leads nobody"])
def test_suspended_prefill_ranks_are_gone_round_and_ended(cluster, expected, which):
    """They could write to pages whenever they go on; so they do not."""
    askers = begin(cluster, 40, 12)
    for rank in cluster.ranks("prefill0")[which]:
        rank.suspend()
    stopped_s = time.monotonic()
    answers = askers.told_in_time(cluster, stopped_s)
    assert [status for status, _, _ in answers] == [200] * 40
    check_answers(answers, expected)
    pages_return(cluster, "decode0", stopped_s)
    cluster.wait_for_line(r"(rank \d has been suspended for 4 s, it is ended)")
    wait_for_balance(cluster)
    taken = hand_offs(cluster, "taken")
    assert ask(cluster, CASES[0]["prompt"]).status_code == 200 and hand_offs(cluster, "taken") == taken + 1


@pytest.mark.long
def test_suspended_decode_ranks_end_their_requests_with_errors(cluster, expected):
    askers = begin(cluster, 40, 400)
    for rank in cluster.ranks("decode0"):
        rank.suspend()
    stopped_s = time.monotonic()
    answers = askers.told_in_time(cluster, stopped_s)
    assert {status for status, _, _ in answers} <= {200, 500, 503}
    check_answers(answers, expected)
    pages_return(cluster, "prefill0", stopped_s)
    wait_for_balance(cluster)


@pytest.mark.long
def test_a_decode_instance_grows_and_shrinks_by_command(cluster, expected):
    """Beyond what the file says; whoever leaves finishes what it has."""
    wait_for_balance(cluster)
    for dp in (3, 1, 2):
        askers = begin(cluster, 24, 100)
        body, headers = {"instance": "decode0", "dp": dp}, {"authorization": "Bearer root"}
        assert httpx.post(cluster.url + "/scale", json=body, headers=headers).status_code == 202
        answers = askers.end()
        assert [status for status, _, _ in answers] == [200] * 24
        check_answers(answers, expected)
        wait_until(lambda dp=dp: num_engines(cluster) == 1 + dp and is_ready(cluster.url), f"{dp} decode ranks")
    wait_for_balance(cluster)


@pytest.mark.long
def test_a_killed_frontend_comes_back_and_finds_every_page(cluster, expected):
    askers = begin(cluster, 20, 200)
    cluster.frontend.kill()
    cluster.wait_for_line(r"(frontend failed: signal SIGKILL; it is started again)")
    assert {status for status, _, _ in askers.end()} <= {0, 200}
    wait_for_balance(cluster)
    assert ask(cluster, CASES[0]["prompt"]).json()["choices"][0]["text"] == expected[0]


@pytest.mark.long
def test_a_prefill_instance_leaves_while_decode_serves(cluster, expected):
    """The last test here: what has ended in order is not started again."""
    askers = begin(cluster, 40, 12)
    for rank in cluster.ranks("prefill0"):
        rank.parent().terminate()
    answers = askers.end()
    assert [status for status, _, _ in answers] == [200] * 40
    check_answers(answers, expected)
    cluster.wait_for_line(r"(prefill0 ended)")
    assert num_engines(cluster) == 2
    assert ask(cluster, CASES[0]["prompt"]).json()["choices"][0]["text"] == expected[0]
