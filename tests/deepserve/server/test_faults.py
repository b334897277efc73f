"""Clients that leave, engines that die, servers that end: nobody hangs, nothing is cut off without a word."""

import asyncio
import contextlib
import json
import socket

import openai
import pytest

from deepserve.engine.request import SequenceOutput
from deepserve.server import lifecycle
from deepserve.spawn import RankDeath

PROMPT = {"prompt": "Hi", "max_tokens": 50}
ROUTES = [
    ("/v1/completions", PROMPT),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}),
]


def send_raw(server, path: str, body: dict) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", server.frontend.port), timeout=10)
    payload = json.dumps(body).encode()
    raw.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(payload)) + payload)
    return raw


def send_head(server, path: str, length: int) -> socket.socket:
    """A request that promises a body and sends one byte of it."""
    raw = socket.create_connection(("127.0.0.1", server.frontend.port), timeout=10)
    raw.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n{" % (path.encode(), length))
    return raw


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 3])
def test_disconnect_aborts(server, path, body, stream, hold_after):
    engine = server.engine(hold_after=hold_after)
    with send_raw(server, path, {**body, "stream": stream, "n": 2}) as raw:
        engine.wait_for(lambda: engine.submitted and engine.steps >= hold_after, "the first tokens")
        if stream and hold_after:
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
    engine.wait_for(lambda: engine.aborted == [engine.submitted[0].request_id], "abort")
    server.wait_until_idle()
    assert server.frontend.client.engines and not any(each.requests for each in server.frontend.client.engines.values())


def test_disconnect_aborts_every_prompt(server):
    engine = server.engine(hold_after=1)
    with send_raw(server, "/v1/completions", {"prompt": ["a", "b", "c"], "stream": True}):
        engine.wait_for(lambda: len(engine.submitted) == 3 and engine.steps, "the first tokens")
    engine.wait_for(lambda: sorted(engine.aborted) == sorted(s.request_id for s in engine.submitted), "aborts")


def test_finished_requests_are_not_aborted(server):
    engine = server.engine()
    server.http.post("/v1/completions", json=PROMPT)
    server.http.post("/v1/completions", json={**PROMPT, "stream": True})
    server.wait_until_idle()
    assert engine.aborted == []


def end_without_a_word(server, engine):
    engine.kill()


def end_with_goodbye(server, engine):
    engine.goodbye("out of memory in step 7")


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("end", [end_without_a_word, end_with_goodbye])
def test_engine_death_in_mid_stream(serve, path, body, end):
    server = serve(engine_silence_limit_s=0.4)
    engine = server.engine(hold_after=3)
    stream = server.http.stream("POST", path, json={**body, "stream": True})
    whole = server.in_background(lambda: server.http.post(path, json=body))
    with stream as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        engine.wait_for(lambda: len(engine.submitted) == 2, "both requests")
        end(server, engine)
        rest = [line for line in lines if line]
    assert rest[-1] != "data: [DONE]"
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"} and "unified-0" in error["message"]
    assert end is not end_with_goodbye or "out of memory in step 7" in error["message"]
    assert whole.result(10).status_code == 500
    assert whole.result(10).json()["error"]["message"] == error["message"]
    assert server.http.get("/health").status_code == 503


def test_openai_client_sees_the_error(server):
    engine = server.engine(hold_after=3)
    stream = server.openai.completions.create(model="deepserve-tiny", prompt="Hi", stream=True)
    next(iter(stream))
    engine.goodbye("gone")
    with pytest.raises(openai.APIError, match="gone"):
        list(stream)


def test_death_before_the_first_token_has_its_own_status(server):
    engine = server.engine(hold_after=0)
    answer = server.in_background(lambda: server.http.post("/v1/completions", json={**PROMPT, "stream": True}))
    engine.wait_for(lambda: engine.submitted, "the request")
    engine.goodbye("gone")
    assert answer.result(10).status_code == 500


def test_error_of_one_prompt_ends_the_others(server):
    engine = server.engine(hold_after=1)
    answer = server.in_background(lambda: server.http.post("/v1/completions", json={"prompt": ["a", "b"]}))
    engine.wait_for(lambda: len(engine.submitted) == 2, "both requests")
    first, second = (submit.request_id for submit in engine.submitted)
    engine.send(SequenceOutput(first, 0, [], finish_reason="error", error="no pages"))
    assert answer.result(10).status_code == 500 and "no pages" in answer.result(10).text
    engine.wait_for(lambda: engine.aborted == [second], "abort of the other")


def test_silent_engine_is_dropped_and_comes_back(serve):
    server = serve(engine_silence_limit_s=0.4)
    engine = server.engine(hold_after=2)
    answer = server.in_background(lambda: server.http.post("/v1/completions", json=PROMPT))
    engine.wait_for(lambda: engine.steps == 2, "two tokens")
    engine.mute()
    assert answer.result(10).status_code == 500 and "silent" in answer.result(10).text
    assert server.http.get("/health").status_code == 503
    engine.unmute()
    engine.wait_for(lambda: engine.aborted == [engine.submitted[0].request_id], "abort of what nobody reads")
    server.call(server.frontend.client.wait_for_engines(1))
    engine.release()
    assert server.http.post("/v1/completions", json=PROMPT).status_code == 200


def test_beats_keep_a_slow_engine(serve):
    """A step longer than the limit of silence is no death while the engine beats."""
    server = serve(engine_silence_limit_s=0.4)
    engine = server.engine(hold_after=1)
    answer = server.in_background(lambda: server.http.post("/v1/completions", json=PROMPT))
    engine.wait_for(lambda: engine.steps == 1, "one token")
    with pytest.raises(TimeoutError):
        answer.result(1.0)  # several limits long
    engine.release()
    assert answer.result(10).status_code == 200


def test_load_spreads_and_the_living_go_on(server):
    first = server.engine(hold_after=1)
    second = server.engine(dp_rank=1, hold_after=1)
    answers = [server.in_background(lambda: server.http.post("/v1/completions", json=PROMPT)) for _ in range(6)]
    first.wait_for(lambda: len(first.submitted) == 3, "half of the requests")
    second.wait_for(lambda: len(second.submitted) == 3, "the other half")
    first.goodbye("gone")
    second.release()
    assert sorted(answer.result(10).status_code for answer in answers) == [200] * 3 + [500] * 3
    assert server.http.get("/health").status_code == 200


def test_ready_waits_for_every_rank(serve):
    server = serve(num_engines=2)
    server.engine()
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 503
    server.engine(dp_rank=1)
    assert server.http.get("/ready").json() == {"status": "ready", "engines": 2}


def test_drain(serve):
    server = serve()
    engine = server.engine(hold_after=2)
    running = server.in_background(lambda: server.http.post("/v1/completions", json={**PROMPT, "stream": True}))
    engine.wait_for(lambda: engine.steps == 2, "two tokens")
    server.shut_down()
    server.call(until(lambda: server.frontend.state.draining))
    refused = server.http.post("/v1/completions", json=PROMPT)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining" and refused.headers["retry-after"]
    assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 503
    assert server.http.get("/metrics").status_code == 200
    engine.release()
    assert running.result(10).text.endswith("data: [DONE]\n\n")
    assert server.wait_for_exit() == 0


def test_drain_has_a_limit(serve):
    server = serve(shutdown_timeout_s=0.2)
    engine = server.engine(hold_after=2)
    running = server.in_background(lambda: server.http.post("/v1/completions", json={**PROMPT, "stream": True}))
    engine.wait_for(lambda: engine.steps == 2, "two tokens")
    server.shut_down()
    assert server.wait_for_exit() == 0
    last = running.result(10).text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]


class DyingSpawn:
    """A child process that ends when told to."""

    def __init__(self):
        self.death = None
        self.address = None
        self.stopped = False

    def start(self, frontend_address: str):
        self.address = frontend_address

    def poll(self, serving):
        return self.death

    def scale(self, dp: int):
        raise ValueError(f"dp {dp}: this one cannot be scaled")

    def stop(self, grace_s: float):
        self.stopped = True


def test_death_of_a_child_ends_the_server(serve, capfd):
    spawn = DyingSpawn()
    server = serve(spawn=spawn)
    engine = server.engine(hold_after=2)
    assert spawn.address == server.frontend.client.address
    running = server.in_background(lambda: server.http.post("/v1/completions", json={**PROMPT, "stream": True}))
    engine.wait_for(lambda: engine.steps == 2, "two tokens")
    spawn.death = RankDeath(rank=2, pid=77, code=9)
    assert "exit code 9" in json.loads(running.result(10).text.split("\n\n")[-2].removeprefix("data: "))["error"]["message"]
    assert server.wait_for_exit() == 9 and spawn.stopped
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "deepserve: rank 2 (pid 77) ended with exit code 9 and was not told to; the server stopped"


class FailingSpawn(DyingSpawn):
    def start(self, frontend_address: str):
        raise FileNotFoundError("no such program")


def test_children_that_cannot_start_end_the_server(serve, capfd):
    server = serve(spawn=FailingSpawn())
    assert server.wait_for_exit() == 1
    assert "no such program" in capfd.readouterr().err.splitlines()[-1]


def test_slow_reader_gets_everything(server):
    """Outputs pile up merged while a client does not read."""
    engine = server.engine(reply=server.encode("x" * 50), tokens_per_step=8)
    body = {"prompt": "Hi", "max_tokens": 4000, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    with send_raw(server, "/v1/completions", body) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        engine.wait_for(lambda: not engine._running and engine.submitted, "the end of the request")
        received = b""
        while b"[DONE]" not in received:
            received += raw.recv(1 << 16)
    assert b'"completion_tokens":4000' in received


def test_a_client_that_reads_nothing_is_cut_off(serve, monkeypatch):
    """Else it would hold up a drain for ever."""
    monkeypatch.setattr(lifecycle, "UNREAD_S", 0.5)
    server = serve()
    server.engine(reply=server.encode("x" * 50), tokens_per_step=8)
    body = {"prompt": "Hi", "max_tokens": 4000, "stream": True, "logprobs": 64, "ignore_eos": True}
    with send_raw(server, "/v1/completions", body) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
        server.wait_until_idle()


@pytest.mark.parametrize("path", [path for path, _ in ROUTES])
def test_a_body_that_does_not_end(serve, path):
    server = serve(body_timeout_s=0.2)
    server.engine()
    with send_head(server, path, 100) as raw:
        answer = b"".join(iter(lambda: raw.recv(1 << 16), b""))  # until the server closes
        assert answer.startswith(b"HTTP/1.1 408") and b"0.2 s" in answer
    server.wait_until_idle()


def test_a_client_that_leaves_within_its_body_is_no_fault(server, caplog):
    server.engine()
    with send_head(server, "/v1/completions", 100):
        server.call(until(lambda: server.frontend.state.num_in_flight == 1))
    server.wait_until_idle()
    assert not caplog.records


def test_a_head_that_does_not_end(server):
    with socket.create_connection(("127.0.0.1", server.frontend.port), timeout=10) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nx: ")
        with contextlib.suppress(OSError):  # it may hang up while we still send
            for _ in range(100):
                raw.sendall(b"a" * 10_000)
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(1 << 16).startswith(b"HTTP/1.1 400")
    assert server.http.get("/metrics").status_code == 200


async def until(condition):
    """For what has no event of its own; the caller's deadline ends it."""
    while not condition():
        await asyncio.sleep(0.001)
