"""Ranks that die, stand still, or only pause: clients hear of it, everything ends, the parent says who it was, nothing is left.

Times that hold: a dead rank ends the instance at once, one that stands still for good after the step timeout (`--step-timeout-s`);
parked ranks notice both at most `PARK_S` later. Then the instance takes `BLAME_S` to find who it was and `HURRY_S` to end.
"""

import contextlib
import json
import queue
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import psutil
import pytest

from deepserve import LLM, SamplingParams
from deepserve.engine.lockstep import PARK_S
from deepserve.server.lifecycle import HURRY_S
from deepserve.spawn import BLAME_S
from tests.deepserve.serving import WAIT_S, Served

ERROR_S = 10.0  # until a client hears that its rank died
STEP_TIMEOUT_S = 4.0
SLACK_S = 5.0  # the frontend looks ten times in a limit; machines are busy
END_S = STEP_TIMEOUT_S + BLAME_S + HURRY_S + SLACK_S
PAUSE_S = 5.0
LAYOUTS = {"dp2": ("--dp", "2"), "tp2": ("--tp", "2")}
SMALL = ("--max-model-len", "4096", "--num-threads", "1")
PROMPT = {"model": "deepserve-tiny", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
ANSWER = {"model": "deepserve-tiny", "prompt": "In the beginning", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def ranks_of(server: Served, num_ranks: int) -> list[psutil.Process]:
    """Processes of the ranks in rank order, which is the order of their start."""
    deadline = time.monotonic() + WAIT_S
    while True:
        found = psutil.Process(server.process.pid).children(recursive=True)
        found = sorted((p for p in found if "deepserve.engine.loop" in _command(p)), key=lambda p: (p.create_time(), p.pid))
        if len(found) == num_ranks:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.01)  # between looks at a condition with a deadline


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        command = process.cmdline()
        return command if command[:1] != ["env"] else []
    return []


class Stream:
    """A streamed completion, read in a thread. `events` are the data lines that have come."""

    def __init__(self, url: str, **fields):
        self.events: list[str] = []
        self._first: queue.Queue = queue.Queue()
        self._thread = threading.Thread(target=self._read, args=(url, {**PROMPT, **fields}), daemon=True)
        self._thread.start()

    def _read(self, url: str, body: dict) -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", url + "/v1/completions", json=body, timeout=WAIT_S) as reply:
            for line in reply.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                    self._first.put(None)

    def wait_for_first(self) -> None:
        self._first.get(timeout=WAIT_S)

    def wait_for_end(self, timeout_s: float) -> list[str]:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"a client still waits after {timeout_s:g} s"
        return self.events


def start_streams(server: Served, num: int, **fields) -> list[Stream]:
    """Streams that have all begun; by turns on the DP replicas."""
    streams = [Stream(server.url, **fields) for _ in range(num)]
    for stream in streams:
        stream.wait_for_first()
    return streams


def assert_failed(streams: list[Stream], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for stream in streams:
        events = stream.wait_for_end(max(0.0, deadline - time.monotonic()))
        assert "[DONE]" not in events
        assert "error" in json.loads(events[-1]), events[-1]


def assert_no_route(url: str) -> None:
    """/health says 503, or nobody is there to say anything."""
    try:
        assert httpx.get(url + "/health", timeout=5.0).status_code == 503
    except httpx.HTTPError:
        return


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5.0)
    assert not alive


def each_rank(*short: tuple[str, int]) -> pytest.MarkDecorator:
    """Each rank of each layout; all but the short ones only in the full grids, for starting ranks is most of what these tests take."""
    cases = [(layout, rank) for layout in LAYOUTS for rank in (0, 1)]
    return pytest.mark.parametrize(("layout", "rank"), [pytest.param(*c, marks=[] if c in short else [pytest.mark.long]) for c in cases])


@each_rank(("dp2", 0), ("tp2", 1))
def test_killed_while_streaming(layout: str, rank: int):
    with Served(*LAYOUTS[layout], *SMALL) as server:
        ranks = ranks_of(server, 2)
        streams = start_streams(server, 4)
        ranks[rank].kill()
        assert_failed(streams, ERROR_S)
        assert_no_route(server.url)
        assert server.end() == 128 + signal.SIGKILL
        assert f"rank {rank} (pid {ranks[rank].pid}) ended with signal SIGKILL" in server.lines[-1]
        assert_gone(ranks)


@each_rank(("dp2", 1), ("tp2", 0))
def test_killed_while_idle(layout: str, rank: int):
    with Served(*LAYOUTS[layout], *SMALL) as server:
        ranks = ranks_of(server, 2)
        started = time.monotonic()
        ranks[rank].kill()
        assert server.end(ERROR_S) == 128 + signal.SIGKILL
        assert time.monotonic() - started < ERROR_S
        assert f"rank {rank} (pid {ranks[rank].pid}) ended with signal SIGKILL" in server.lines[-1]
        assert_gone(ranks)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("moment", ["at once", "while its peer waits for it"])
def test_killed_while_starting(moment: str, rank: int):
    with Served("--dp", "2", *SMALL, wait_ready=False) as server:
        ranks = ranks_of(server, 2)
        if moment != "at once":
            ranks[rank].suspend()
            wait_for_peer(ranks[1 - rank])
        with httpx.Client(timeout=ERROR_S) as client, contextlib.suppress(httpx.ConnectError):  # it may have ended by then
            ranks[rank].kill()
            reply = client.post(server.url + "/v1/completions", json={**PROMPT, "stream": False})
            assert reply.status_code == 503 and "error" in reply.json()
        assert server.end(ERROR_S) == 128 + signal.SIGKILL
        assert f"rank {rank} (pid {ranks[rank].pid}) ended with signal SIGKILL" in server.lines[-1]
        assert_gone(ranks)


def wait_for_peer(process: psutil.Process) -> None:
    """Until a rank has loaded its libraries and sleeps: then it waits for the other one."""
    deadline = time.monotonic() + WAIT_S
    used, since = 0.0, time.monotonic()
    while used < 0.5 or time.monotonic() - since < 0.5:
        now = sum(process.cpu_times()[:2])
        if now > used + 0.02:
            used, since = now, time.monotonic()
        assert time.monotonic() < deadline
        time.sleep(0.02)  # between looks at a condition with a deadline


@contextlib.contextmanager
def suspended(process: psutil.Process):
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def a_pause_is_not_a_death(layout: str) -> None:
    """Whichever rank it is: the others wait for it, and requests are finished."""
    with Served(*LAYOUTS[layout], *SMALL) as server:
        for rank in ranks_of(server, 2):
            streams = start_streams(server, 2, max_tokens=120)
            with suspended(rank):
                time.sleep(PAUSE_S)  # the pause is what is tested
                assert not any("[DONE]" in stream.events for stream in streams), "they ended before the pause"
                assert httpx.get(server.url + "/health").status_code == 200
            for stream in streams:
                events = stream.wait_for_end(WAIT_S)
                assert events[-1] == "[DONE]" and not any("error" in json.loads(event) for event in events[:-1])
        assert httpx.get(server.url + "/health").status_code == 200
        assert len(ranks_of(server, 2)) == 2


def a_rank_that_stands_still_for_good_ends_the_instance(layout: str, rank: int) -> None:
    with Served(*LAYOUTS[layout], *SMALL, "--step-timeout-s", f"{STEP_TIMEOUT_S:g}") as server:
        ranks = ranks_of(server, 2)
        streams = start_streams(server, 2)
        with suspended(ranks[rank]):
            started = time.monotonic()
            assert_failed(streams, STEP_TIMEOUT_S + SLACK_S)
            assert_no_route(server.url)
            assert server.end(END_S) != 0
            assert time.monotonic() - started < END_S
            assert f"rank {rank} (pid {ranks[rank].pid})" in server.lines[-1], server.lines[-1]
            assert_gone(ranks)


def a_single_rank_that_stands_still_for_good_ends_its_server() -> None:
    with Served(*SMALL, "--step-timeout-s", f"{STEP_TIMEOUT_S:g}") as server:
        (rank,) = ranks_of(server, 1)
        streams = start_streams(server, 2)
        with suspended(rank):
            assert_failed(streams, STEP_TIMEOUT_S + SLACK_S)
            assert server.end(END_S) == 1
            assert f"rank 0 (pid {rank.pid})" in server.lines[-1], server.lines[-1]
            assert_gone([rank])


def a_parked_rank_that_stands_still_for_good_ends_the_instance() -> None:
    """Parked ranks look after each other: nobody has to ask for anything. The follower of a TP group beats for no frontend."""
    with Served("--tp", "2", *SMALL, "--step-timeout-s", f"{STEP_TIMEOUT_S:g}") as server:
        ranks = ranks_of(server, 2)
        with suspended(ranks[1]):
            assert server.end(PARK_S + END_S) != 0
            assert f"rank 1 (pid {ranks[1].pid}) stood still" in server.lines[-1], server.lines[-1]
            assert_gone(ranks)


def test_ranks_that_stand_still_or_only_pause():
    """All at the same time, since they mostly wait."""
    cases = [
        partial(a_pause_is_not_a_death, "dp2"),
        partial(a_rank_that_stands_still_for_good_ends_the_instance, "dp2", 0),
        a_single_rank_that_stands_still_for_good_ends_its_server,
        a_parked_rank_that_stands_still_for_good_ends_the_instance,
    ]
    with ThreadPoolExecutor(len(cases)) as pool:
        for job in [pool.submit(case) for case in cases]:
            job.result()


@pytest.mark.long
@pytest.mark.parametrize(("layout", "rank"), [("dp2", 1), ("tp2", 0), ("tp2", 1)])
def test_each_rank_that_stands_still_for_good(layout: str, rank: int):
    a_rank_that_stands_still_for_good_ends_the_instance(layout, rank)


@pytest.mark.long
def test_ranks_of_a_tp_group_may_pause():
    a_pause_is_not_a_death("tp2")


class Torchrun(Served):
    """`torchrun -m launch.worker`, with the interface of `Served`."""

    def __init__(self, num_ranks: int, *flags: str):
        run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m", "launch.worker")
        super().__init__(*flags, launcher=run)


def answer(server: Served) -> str:
    return httpx.post(server.url + "/v1/completions", json=ANSWER, timeout=WAIT_S).json()["choices"][0]["text"]


def test_torchrun_gives_the_same_answer_and_ends_with_a_killed_rank():
    with LLM(max_model_len=4096, num_threads=1, batch_invariant=True) as llm:
        params = SamplingParams(max_tokens=ANSWER["max_tokens"], temperature=0, ignore_eos=True)
        expected = llm.generate(ANSWER["prompt"], params, use_tqdm=False)[0].outputs[0].text
    with Torchrun(2, "--dp", "2", *SMALL, "--batch-invariant") as server:
        assert len({answer(server) for _ in range(4)} | {expected}) == 1
        tree = psutil.Process(server.process.pid).children(recursive=True)
        ranks = ranks_of(server, 2)
        streams = start_streams(server, 4)
        ranks[1].kill()
        assert_failed(streams, ERROR_S)
        assert_no_route(server.url)
        assert server.end() != 0
        assert any(f"(pid {ranks[1].pid}) ended with signal SIGKILL" in line for line in server.lines)
        assert_gone(tree)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchrun_ends_when_the_first_rank_is_killed_while_idle(layout: str):
    with Torchrun(2, *LAYOUTS[layout], *SMALL) as server:
        tree = psutil.Process(server.process.pid).children(recursive=True)
        ranks_by_guardian(server)[0].kill()
        assert server.end(WAIT_S) != 0
        assert_gone(tree)


def ranks_by_guardian(server: Served) -> list[psutil.Process]:
    """Ranks in the order of their guardians' RANK."""
    return sorted(ranks_of(server, 2), key=lambda p: int(p.parent().environ()["RANK"]))


def test_torchrun_passes_sigterm_on_as_a_drain():
    with Torchrun(2, "--dp", "2", *SMALL) as server:
        tree = psutil.Process(server.process.pid).children(recursive=True)
        (stream,) = start_streams(server, 1, max_tokens=100)
        server.process.send_signal(signal.SIGTERM)
        assert stream.wait_for_end(WAIT_S)[-1] == "[DONE]"
        server.end(WAIT_S)
        assert_gone(tree)


def test_a_killed_guardian_takes_its_rank_and_the_instance_along():
    with Torchrun(2, "--tp", "2", *SMALL) as server:
        tree = psutil.Process(server.process.pid).children(recursive=True)
        ranks_by_guardian(server)[1].parent().kill()
        assert server.end(WAIT_S) != 0
        assert_gone(tree)
