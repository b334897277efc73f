"""An instance that outlives its ranks: kill -9 of one, of all but one, and their successors; what clients and sequences see of it."""

import contextlib
import json
import time
from pathlib import Path

import httpx
import psutil
import pytest

from deepserve.config import EngineArgs
from deepserve.engine.engine import resolve
from deepserve.pool import RankPool
from hw.api import Unsupported
from tests.deepserve.serving import WAIT_S, Served
from tests.deepserve.test_rank_death import SMALL, Stream, ranks_of, suspended

NUM_TOKENS = 100
MOVING = json.dumps({"num_redundant_experts": 4, "step_interval": 7, "window_size": 16, "tolerance": 0, "hysteresis": 0})
# Drafts, moves and asynchronous steps are under way when somebody dies.
FLAGS = (
    "--on-rank-death",
    "replan",
    "--batch-invariant",
    "--num-speculative-tokens",
    "1",
    "--eplb-config",
    MOVING,
    "--async-scheduling",
    "--cpu-kernels",
    "torch",
    "--admin-api-key",
    "root",
)


def prompts(num: int) -> list[str]:
    return [f"Count from {i} to {i + 40}:" for i in range(num)]


def streams_of(server: Served, num: int) -> list[Stream]:
    """They end by themselves after `NUM_TOKENS` tokens; by turns on the replicas."""
    return [Stream(server.url, prompt=text, max_tokens=NUM_TOKENS, temperature=0, logprobs=0) for text in prompts(num)]


def told(events: list[str]) -> tuple[str, list[float]]:
    """Text and log-probabilities."""
    choices = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
    return "".join(c["text"] for c in choices), [value for c in choices for value in (c["logprobs"] or {}).get("token_logprobs", [])]


def ended_well(stream: Stream) -> bool:
    return stream.wait_for_end(WAIT_S)[-1] == "[DONE]"


def wait_until_whole(server: Served, num_ranks: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while httpx.get(server.url + "/ready").status_code != 200:
        assert time.monotonic() < deadline, "\n".join(server.lines)
        time.sleep(0.05)  # between looks at a condition with a deadline
    assert len(ranks_of(server, num_ranks)) == num_ranks


def by_rank(server: Served, num_ranks: int) -> dict[int, psutil.Process]:
    """The latest process of each rank, by what the server said when it joined."""
    joined = [line.split(" rank ")[1] for line in server.lines if "joined:" in line]
    pids = {int(text.split()[0]): int(text.split("(pid ")[1].split(")")[0]) for text in joined}
    assert len(pids) == num_ranks
    return {rank: psutil.Process(pid) for rank, pid in pids.items()}


@pytest.fixture(scope="module")
def server():
    with Served("--dp", "3", *SMALL, *FLAGS) as served:
        yield served


@pytest.fixture(scope="module")
def undisturbed(server: Served) -> list[tuple[str, list[float]]]:
    return [told(stream.wait_for_end(WAIT_S)) for stream in streams_of(server, 6)]


def test_the_others_go_on_without_the_first_then_one_alone_then_all_again(server: Served, undisturbed: list):
    ranks = by_rank(server, 3)
    streams = streams_of(server, 6)
    for stream in streams:
        stream.wait_for_first()
    ranks[0].kill()
    server.wait_for_line(r"went on with (2) ranks")
    ranks[2].kill()
    server.wait_for_line(r"went on with (1) ranks")
    survived = [number for number, stream in enumerate(streams) if ended_well(stream)]
    assert len(survived) == 2, "each rank had two"
    for number, stream in enumerate(streams):
        if number in survived:
            assert told(stream.events) == undisturbed[number], f"stream {number} came to something else"
        else:
            assert "error" in json.loads(stream.events[-1]) and "signal SIGKILL" in stream.events[-1]
    assert ranks[1].is_running() and httpx.get(server.url + "/health").status_code == 200
    wait_until_whole(server, 3)
    assert [told(stream.wait_for_end(WAIT_S)) for stream in streams_of(server, 6)] == undisturbed, "after the successors joined"
    assert ranks[1].is_running(), "the instance was not restarted"
    server.wait_for_metric("vllm:kv_cache_usage_perc", 0)
    server.wait_for_metric("vllm:num_requests_running", 0)


@pytest.mark.long
def test_what_has_not_begun_is_run_elsewhere(server: Served, undisturbed: list):
    """Nothing comes from anybody while one stands still. Then it is dead, and the others answer its requests too."""
    wait_until_whole(server, 3)
    rank = by_rank(server, 3)[1]
    with suspended(rank):
        streams = streams_of(server, 6)
        server.wait_for_metric("vllm:num_requests_waiting", 0)  # all have been handed to ranks
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    assert all(map(ended_well, streams))
    assert [told(stream.events) for stream in streams] == undisturbed
    wait_until_whole(server, 3)


@pytest.mark.long
def test_a_dead_tp_rank_takes_only_its_replica_along():
    with Served("--dp", "2", "--tp", "2", *SMALL, "--on-rank-death", "replan", "--cpu-kernels", "torch") as server:
        leaders = by_rank(server, 2)
        follower = ranks_of(server, 4)[3]
        streams = streams_of(server, 4)
        for stream in streams:
            stream.wait_for_first()
        follower.kill()
        assert sum(map(ended_well, streams)) == 2
        wait_until_whole(server, 4)
        assert leaders[0].is_running() and not leaders[1].is_running()
        assert all(map(ended_well, streams_of(server, 4)))


def scale(server: Served, dp: object, key: str = "root") -> httpx.Response:
    return httpx.post(server.url + "/scale", json={"dp": dp}, headers={"authorization": f"Bearer {key}"})


def test_scaling_down_and_up_while_serving(server: Served, undisturbed: list):
    wait_until_whole(server, 3)
    stays, *leaving = sorted(by_rank(server, 3).values(), key=lambda process: process.create_time())
    streams = streams_of(server, 6)
    for stream in streams:
        stream.wait_for_first()
    assert scale(server, 1).status_code == 202
    assert all(map(ended_well, streams)), "who leaves finishes what it has"
    assert [told(stream.events) for stream in streams] == undisturbed
    _, alive = psutil.wait_procs(leaving, WAIT_S)
    assert not alive and stays.is_running()
    assert [told(stream.wait_for_end(WAIT_S)) for stream in streams_of(server, 1)] == undisturbed[:1]
    assert scale(server, 4).status_code == 202, "one more than it was started with"
    wait_until_whole(server, 4)
    assert [told(stream.wait_for_end(WAIT_S)) for stream in streams_of(server, 6)] == undisturbed
    assert stays.is_running() and server.metric("vllm:kv_cache_usage_perc") == 0


def test_scaling_that_is_refused(server: Served):
    assert scale(server, 2, key="guest").status_code == 401
    for dp, sentence in ((0, "dp must be from 1 to 64"), (65, "dp must be from 1 to 64"), ("2", "Expected `int`, got `str`")):
        reply = scale(server, dp)
        assert reply.status_code == 400 and sentence in reply.json()["error"]["message"]


@pytest.mark.long
def test_a_rank_that_stands_still_for_good_is_replaced():
    with Served("--dp", "2", *SMALL, "--on-rank-death", "replan", "--step-timeout-s", "4") as server:
        stuck = by_rank(server, 2)[1]
        streams = streams_of(server, 2)
        for stream in streams:
            stream.wait_for_first()
        with suspended(stuck):
            assert sum(map(ended_well, streams)) == 1
            server.wait_for_line(r"went on with (1) ranks")
            wait_until_whole(server, 2)
        assert not stuck.is_running()
        assert all(map(ended_well, streams_of(server, 2)))


def test_who_refuses(tmp_path: Path):
    args = EngineArgs(on_rank_death="replan", device="cuda")
    with pytest.raises(Unsupported, match="cuda: on_rank_death 'replan': kernels that bring rows to experts wait for all ranks"):
        resolve(args)
    with pytest.raises(ValueError, match="on_rank_death 'replan' is for servers"):
        RankPool(args)
    with pytest.raises(ValueError, match="on_rank_death 'replan' needs all ranks of an instance on one host, num_nodes is 2"):
        resolve(EngineArgs(on_rank_death="replan", data_parallel_size=2, num_nodes=2))
