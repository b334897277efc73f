"""Several instances behind one frontend: they join, leave, die, fall quiet and come back, and strangers stay outside."""

import asyncio
import logging
import time
from concurrent.futures import Future

import httpx
import msgspec
import pytest
import zmq

from deepserve.control import Line, secure_client
from deepserve.server.client import EngineClient
from tests.deepserve.server.conftest import REGISTER, WAIT_S, FakeEngine, Served

PROMPT = {"prompt": "Hi", "max_tokens": 6}
SECRET = "0123456789abcdef0123456789abcdef"
OTHER = SECRET[::-1]
QUIET = {"engine_quiet_limit_s": 0.3, "engine_silence_limit_s": 60.0}
LEAVE_S = 5.0  # in which a dead instance leaves routing


def ask(server: Served, **fields) -> httpx.Response:
    return server.http.post("/v1/completions", json={**PROMPT, **fields})


def ask_later(server: Served, engine: FakeEngine, **fields) -> Future:
    """A request that has reached `engine`."""
    num_before = len(engine.submitted)
    answer = server.in_background(lambda: ask(server, **fields))
    engine.wait_for(lambda: len(engine.submitted) > num_before, "the request")
    return answer


def wait_until(condition, what: str, timeout_s: float = WAIT_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)  # between looks at a condition with a deadline


def killed(engine: FakeEngine):
    engine.kill()


def said_goodbye(engine: FakeEngine):
    engine.goodbye("out of memory")


def fell_silent(engine: FakeEngine):
    engine.mute()


ENDS = [killed, said_goodbye, fell_silent]


@pytest.mark.parametrize("end", ENDS)
def test_a_request_without_a_token_is_sent_elsewhere(serve, end):
    server = serve(**QUIET)
    first = server.engine(instance="a", hold_after=0)
    answers = [ask_later(server, first), ask_later(server, first, n=2)]
    second = server.engine(instance="b")
    end(first)
    assert [answer.result(WAIT_S).status_code for answer in answers] == [200, 200]
    assert answers[1].result().json()["usage"]["completion_tokens"] == 12
    assert [submit.request_id for submit in second.submitted] == [submit.request_id for submit in first.submitted]
    assert ask(server).status_code == 200 and len(second.submitted) == 3


@pytest.mark.parametrize("end", [killed, said_goodbye])
def test_a_request_with_a_token_ends_with_an_error_event(serve, end):
    server = serve(**QUIET)
    first = server.engine(instance="a", hold_after=1)
    with server.http.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        second = server.engine(instance="b")
        end(first)
        rest = [line for line in lines if line]
    assert "error" in rest[-1] and not any("[DONE]" in line for line in rest)
    assert second.submitted == []


def test_it_is_sent_elsewhere_once(serve):
    server = serve(**QUIET)
    first = server.engine(instance="a", hold_after=0)
    answer = ask_later(server, first)
    second = server.engine(instance="b", hold_after=0)
    first.goodbye("gone")
    second.wait_for(lambda: second.submitted, "the request")
    third = server.engine(instance="c")
    second.goodbye("gone too")
    assert answer.result(WAIT_S).status_code == 500 and "gone too" in answer.result().text
    assert third.submitted == []


def test_not_to_another_rank_of_the_same_instance(serve):
    """They step together: where one is lost, all are."""
    server = serve(**QUIET)
    first = server.engine(instance="a", hold_after=0)
    answer = ask_later(server, first)
    second = server.engine(instance="a", dp_rank=1)
    first.goodbye("gone")
    assert answer.result(WAIT_S).status_code == 500
    assert second.submitted == []


def test_a_dead_instance_leaves_routing_and_comes_back_under_its_name(serve):
    server = serve(engine_quiet_limit_s=3.0, engine_silence_limit_s=60.0)
    first, second = server.engine(instance="a"), server.engine(instance="b")
    died = time.monotonic()
    first.kill()
    wait_until(lambda: len(server.frontend.client.engines) == 1, "out of routing", LEAVE_S)
    assert time.monotonic() - died < LEAVE_S
    assert all(ask(server).status_code == 200 for _ in range(4)) and len(second.submitted) == 4
    again = server.engine(instance="a")
    assert all(ask(server).status_code == 200 for _ in range(4)) and again.submitted


def test_a_quiet_instance_gets_nothing_until_it_speaks(serve, caplog):
    server = serve(**QUIET)
    first, second = server.engine(instance="a"), server.engine(instance="b")
    beside = server.engine(instance="a", dp_rank=1)
    first.mute()
    wait_until(lambda: "instance 'a' has been quiet" in caplog.text, "quiet", LEAVE_S)
    num_before = len(first.submitted), len(beside.submitted)
    assert all(ask(server).status_code == 200 for _ in range(6))
    assert (len(first.submitted), len(beside.submitted)) == num_before
    second.kill()
    wait_until(lambda: server.http.get("/health").status_code == 503, "nobody is left", LEAVE_S)
    assert ask(server).status_code == 503
    first.unmute()
    wait_until(lambda: server.http.get("/health").status_code == 200, "it speaks again")
    assert ask(server).status_code == 200


def test_a_rank_silent_for_good_fails_the_requests_of_its_instance(serve):
    server = serve(engine_quiet_limit_s=0.2, engine_silence_limit_s=1.0)
    first, second = server.engine(instance="a", hold_after=1), server.engine(instance="a", dp_rank=1, hold_after=1)
    answers = [server.in_background(lambda: ask(server)) for _ in range(2)]
    for engine in (first, second):
        engine.wait_for(lambda engine=engine: engine.steps == 1, "one token")
    first.mute()
    assert {answer.result(WAIT_S).status_code for answer in answers} == {500}
    assert all("rank 0" in answer.result().text and "silent" in answer.result().text for answer in answers)
    second.wait_for(lambda: second.aborted == [second.submitted[0].request_id], "abort of what nobody reads")
    assert server.http.get("/health").status_code == 503


def test_an_engine_that_leaves_finishes_what_it_has(serve):
    server = serve(**QUIET)
    first = server.engine(instance="a", hold_after=1)
    answer = ask_later(server, first)
    second = server.engine(instance="b")
    first.leave()
    assert all(ask(server).status_code == 200 for _ in range(4)) and len(second.submitted) == 4
    first.release()
    assert answer.result(WAIT_S).status_code == 200
    first.goodbye()
    assert ask(server).status_code == 200


def test_metrics_keep_their_labels(serve):
    server = serve(**QUIET)
    first, second = server.engine(instance="a"), server.engine(instance="b")
    labels = {engine.instance: engine.label for engine in server.frontend.client.engines.values()}
    assert labels == {"a": "a-0", "b": "b-0"}
    first.goodbye()
    second.goodbye()
    server.call(gone(server.frontend.client))
    server.engine(instance="b")
    assert [engine.label for engine in server.frontend.client.engines.values()] == ["b-0"]


async def gone(client: EngineClient):
    while client.engines:
        await client.wait_for_change()


# -- strangers --


@pytest.fixture
def context():
    """Of sockets that a test opens itself; they end with it, however it ends."""
    made = zmq.Context()
    made.linger = 0  # of its sockets: one that nobody refers to any more closes by itself, and would wait for whom it never reached
    yield made
    made.destroy(linger=0)


def test_only_who_knows_the_secret_gets_in(serve, context, caplog):
    server = serve(secret=SECRET, **QUIET)
    address = server.frontend.client.address
    strangers = [context.socket(zmq.DEALER), context.socket(zmq.DEALER)]
    secure_client(strangers[1], OTHER)
    for stranger in strangers:
        stranger.connect(address)
        stranger.send(msgspec.msgpack.encode(REGISTER), zmq.NOBLOCK)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{host}:{port}/", timeout=WAIT_S)
    wait_until(lambda: "refused a connection from " in caplog.text, "a line in the log")
    assert not server.frontend.client.engines
    server.engine(instance="a", secret=SECRET)
    assert ask(server).status_code == 200
    assert not any(stranger.poll(0) for stranger in strangers)
    assert SECRET not in caplog.text


def test_a_rank_talks_to_no_frontend_without_the_secret(context, caplog):
    """Whoever listens on the frontend's port in its place learns nothing."""
    caplog.set_level(logging.ERROR)
    impostor = context.socket(zmq.ROUTER)
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    line = Line(context, f"tcp://127.0.0.1:{port}", secret=SECRET)
    line.socket.send(b"a secret word")
    wait_until(lambda: line.read_news() is not None and "refuses this rank" in caplog.text, "a line in the log")
    assert not impostor.poll(100)
    line.close(0)


def test_a_weak_secret_is_refused(serve):
    with pytest.raises(ValueError, match="the secret has 5 characters, at least 32 are needed"):
        serve(secret="guess")


def test_a_taken_control_port_is_named():
    async def go():
        first = EngineClient()
        try:
            with pytest.raises(OSError, match=f"cannot listen for engines on {first.address}"):
                EngineClient(bind=first.address)
        finally:
            first.close()

    asyncio.run(go())


def test_a_line_notices_that_it_was_made_anew(context):
    frontend = context.socket(zmq.ROUTER)
    port = frontend.bind_to_random_port("tcp://127.0.0.1")
    line = Line(context, f"tcp://127.0.0.1:{port}")
    news: list[tuple[bool, bool]] = []

    def saw(expected: tuple[bool, bool]) -> bool:
        news.append(line.read_news())
        return expected in news

    wait_until(lambda: saw((False, True)), "connected")
    frontend.close(0)
    wait_until(lambda: saw((True, False)), "broken")
    frontend = context.socket(zmq.ROUTER)
    wait_until(lambda: bound(frontend, port), "the port is free again")
    wait_until(lambda: news[-1][1] or saw((False, True)), "connected again")
    line.close(0)


def bound(sock: zmq.Socket, port: int) -> bool:
    try:
        sock.bind(f"tcp://127.0.0.1:{port}")
    except zmq.ZMQError:
        return False
    return True
