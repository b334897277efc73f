"""Guardians of instances that outlive their ranks: the frontend takes their word for who is dead, and passes commands on to them."""

import contextlib
import time

import msgspec
import pytest
import zmq

from deepserve.messages import Died, Guardian, Scale, ToEngine
from tests.deepserve.server.conftest import Served

PROMPT = {"model": "deepserve-tiny", "prompt": "a", "max_tokens": 5}
WAIT_MS = 10_000
ADMIN = {"headers": {"authorization": "Bearer root"}}


@contextlib.contextmanager
def guardian(server: Served, instance: str = "decode0"):
    """Its connection, introduced."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.connect(server.frontend.client.address)
        say(line, Guardian(instance))
        yield line


def wait_until_known(server: Served) -> None:
    deadline = time.monotonic() + WAIT_MS / 1000
    while "one of decode0" not in server.http.post("/scale", json={"dp": 1, "instance": "nobody"}, **ADMIN).text:
        assert time.monotonic() < deadline


def say(line: zmq.Socket, word: Guardian | Died) -> None:
    line.send(msgspec.msgpack.encode(word))


def hear(line: zmq.Socket) -> Scale:
    assert line.poll(WAIT_MS)
    return msgspec.msgpack.decode(line.recv(), type=ToEngine)


def test_a_death_of_which_a_guardian_tells(server):
    """Told to clients at once; what had not begun runs on another rank of the same instance."""
    silent = server.engine(instance="decode0", pid=11, outlived=True, hold_after=0)
    begun = server.engine(instance="decode0", pid=12, dp_rank=1, outlived=True, hold_after=1)
    answers = [server.in_background(lambda: server.http.post("/v1/completions", json=PROMPT)) for _ in range(2)]
    silent.wait_for(lambda: len(silent.submitted) == 1, "one at each")
    begun.wait_for(lambda: begun.steps == 1, "a token")
    living = server.engine(instance="decode0", pid=13, dp_rank=2, outlived=True)
    with guardian(server) as line:
        say(line, Died([11, 12], "rank 0 (pid 11) ended with signal SIGKILL"))
        codes = sorted(answer.result(10).status_code for answer in answers)
        assert codes == [200, 500] and len(living.submitted) == 1
        (failed,) = (answer.result() for answer in answers if answer.result().status_code == 500)
        assert "signal SIGKILL" in failed.json()["error"]["message"]
    assert [engine.register.pid for engine in server.frontend.client.engines.values()] == [13]


def test_what_a_silent_rank_had_not_begun_runs_on_another_one(serve):
    """Never again on the silent one, however little it has to do then."""
    server = serve(engine_silence_limit_s=0.4)
    silent = server.engine(pid=11, outlived=True, hold_after=0)
    moved = server.in_background(lambda: server.http.post("/v1/completions", json=PROMPT))
    silent.wait_for(lambda: silent.submitted, "the request")
    busy = server.engine(pid=12, dp_rank=1, outlived=True, hold_after=0)
    other = server.in_background(lambda: server.http.post("/v1/completions", json={**PROMPT, "n": 4}))
    busy.wait_for(lambda: busy.submitted, "the other request")
    silent.mute()
    busy.wait_for(lambda: len(busy.submitted) == 2, "both requests")
    busy.release()
    assert [answer.result(10).status_code for answer in (moved, other)] == [200, 200]


def test_commands_and_their_answers(serve):
    server = serve(admin_api_key=("root",))
    server.engine(instance="decode0")

    def scale(**body):
        return server.in_background(lambda: server.http.post("/scale", json=body, **ADMIN))

    assert "none was" in scale(dp=2).result(10).json()["error"]["message"]
    with guardian(server) as line:
        wait_until_known(server)
        for body in ({"dp": 3}, {"dp": 3, "instance": "decode0"}):
            answer = scale(**body)
            assert hear(line) == Scale(3)
            say(line, Guardian("decode0", num_more=1))
            assert answer.result(10).status_code == 202
        missing = server.http.get("/ready")
        assert missing.status_code == 503 and "1 of 2 engine ranks have registered" in missing.text, "one more is wanted"
        server.engine(instance="decode0", dp_rank=1)
        assert server.http.get("/ready").status_code == 200
        answer = scale(dp=99)
        hear(line)
        say(line, Guardian("decode0", num_more=1, error="dp must be from 1 to 64, got 99"))
        assert answer.result(10).json()["error"] | {"type": ""} == {
            "message": "dp must be from 1 to 64, got 99", "type": "", "param": "dp", "code": 400,
        }  # fmt: skip
        assert "instance must be one of decode0, got 'x'" in scale(dp=2, instance="x").result(10).text


@pytest.mark.parametrize("instance", ["decode0", ""])
def test_a_guardian_that_is_gone(serve, instance: str):
    server = serve(admin_api_key=("root",))
    with guardian(server):
        wait_until_known(server)
    reply = server.http.post("/scale", json={"dp": 2, "instance": instance}, **ADMIN)
    assert reply.status_code == 400 and "the guardian of instance 'decode0' cannot be reached" in reply.text


def test_a_guardian_that_comes_back_has_not_answered(serve):
    """Its connection broke, and what it was told with it."""
    server = serve(admin_api_key=("root",))
    with guardian(server) as line:
        wait_until_known(server)
        answer = server.in_background(lambda: server.http.post("/scale", json={"dp": 2, "instance": "decode0"}, **ADMIN))
        assert hear(line) == Scale(2)
        with guardian(server):
            reply = answer.result(10)
    assert reply.status_code == 400 and "the guardian of instance 'decode0' lost its connection" in reply.text
