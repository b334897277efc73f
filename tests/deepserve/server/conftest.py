"""A real frontend on a real socket, and a fake engine that speaks the real protocol.

`FakeEngine` computes nothing: it plays tokens from a script, one step at a time, and stops where a test tells it to. It stands in for
an engine only in tests of the frontend.
"""

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
import zmq

import deepserve
from deepserve.control import secure_client
from deepserve.engine.request import PositionLogprobs, SequenceOutput
from deepserve.messages import PROTOCOL_VERSION, Abort, Drain, Goodbye, Heartbeat, Leaving, Load, Outputs, Register, Stop, Submit, ToEngine
from deepserve.server.lifecycle import Frontend
from deepserve.server.state import ServerOptions
from deepserve.text.tokenizer import Tokenizer

MODEL = Path(deepserve.__file__).parent / "models" / "deepserve-tiny"
WAIT_S = 10.0
TEXT = "Grüße, 世界! One, two, three 😀 four."


class FakeEngine:
    """Runs in a thread. Every generated token comes from `reply`; `hold_after` tokens of a sequence it waits for `release`."""

    def __init__(
        self,
        address: str,
        reply: list[int],
        *,
        eos: int = 1,
        hold_after: int | None = None,
        tokens_per_step: int = 1,
        secret: str = "",
        **register,
    ):
        self.reply = reply
        self.eos = eos
        self.hold_after = hold_after
        self.tokens_per_step = tokens_per_step
        self.num_cached_tokens = 0
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.ended_by: str | None = None
        self.steps = 0
        self._address = address
        self._secret = secret
        self._register = msgspec.structs.replace(REGISTER, **register)
        self._news = threading.Condition()
        self._ended = threading.Event()
        self._muted = threading.Event()
        self._commands: list[Callable] = []
        self._running: dict[tuple[str, int], int] = defaultdict(int)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # -- what tests do --

    def wait_for(self, condition: Callable[[], bool], what: str):
        with self._news:
            assert self._news.wait_for(condition, WAIT_S), f"not within {WAIT_S} s: {what}"

    def release(self):
        self.hold_after = None

    def send(self, *outputs: SequenceOutput):
        self._do(lambda: self._send(Outputs(list(outputs), self._load())))

    def send_raw(self, payload: bytes):
        self._do(lambda: self._socket.send(payload))

    def mute(self):
        """No message any more, as if suspended."""
        self._muted.set()

    def unmute(self):
        self._muted.clear()

    def leave(self):
        self._do(lambda: self._send(Leaving()))

    def goodbye(self, error: str = ""):
        self._do(lambda: self._send(Goodbye(error)))
        self.kill()

    def kill(self):
        """End without a word."""
        self._ended.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    # -- what engines do --

    def _do(self, command: Callable):
        done = threading.Event()
        self._commands.append(lambda: (command(), done.set()))
        assert done.wait(WAIT_S)

    def _run(self):
        context = zmq.Context()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        secure_client(self._socket, self._secret)
        self._socket.connect(self._address)
        self._encoder = msgspec.msgpack.Encoder()
        decoder = msgspec.msgpack.Decoder(ToEngine)
        self._send(self._register)
        beat_s = 0.0
        while not self._ended.is_set():
            while self._commands:
                self._commands.pop(0)()
            if self._muted.is_set():
                time.sleep(0.005)  # not a synchronisation: the engine plays dead
                continue
            if time.monotonic() - beat_s > 0.05:
                beat_s = time.monotonic()
                self._send(Heartbeat(self._register.instance, self._register.dp_rank, self._load()))
            if self._socket.poll(0 if self._can_step() else 5):
                self._on_message(decoder.decode(self._socket.recv()))
            else:
                self._step()
        self._socket.close()
        context.term()

    def _on_message(self, message):
        with self._news:
            match message:
                case Submit():
                    self.submitted.append(message)
                    for index in range(message.params.n):
                        self._running[message.request_id, index] = 0
                case Abort():
                    self.aborted += message.request_ids
                    for key in list(self._running):
                        if key[0] in message.request_ids:
                            del self._running[key]
                case Drain() | Stop():
                    self.ended_by = type(message).__name__
                    self._send(Goodbye())
                    self._ended.set()
            self._news.notify_all()

    def _can_step(self) -> bool:
        return any(self.hold_after is None or count < self.hold_after for count in self._running.values())

    def _step(self):
        outputs = []
        for (request_id, index), count in list(self._running.items()):
            if self.hold_after is not None and count >= self.hold_after:
                continue
            request = next(each for each in self.submitted if each.request_id == request_id)
            outputs.append(self._output(request, index, count))
        if outputs:
            self._send(Outputs(outputs, self._load()))
            with self._news:
                self.steps += 1
                self._news.notify_all()

    def _output(self, request: Submit, index: int, count: int) -> SequenceOutput:
        params = request.params
        num_left = params.max_tokens - count
        ids = [self.reply[(count + i) % len(self.reply)] for i in range(min(self.tokens_per_step, num_left))]
        if self.eos in ids and not params.ignore_eos:
            ids = ids[: ids.index(self.eos) + 1]
        stopped = bool(ids) and ids[-1] == self.eos and not params.ignore_eos
        reason = "stop" if stopped else "length" if len(ids) == num_left else None
        self._running[request.request_id, index] += len(ids)
        if reason:
            del self._running[request.request_id, index]
        first = count == 0
        wants_prompt = first and index == 0 and params.prompt_logprobs is not None
        return SequenceOutput(
            request.request_id,
            index,
            ids,
            finish_reason=reason,
            stop_token_id=self.eos if stopped else None,
            logprobs=None if params.logprobs is None else [position(i, params.logprobs) for i in ids],
            prompt_logprobs=[None, *(position(i, params.prompt_logprobs) for i in request.prompt_token_ids[1:])] if wants_prompt else None,
            num_cached_tokens=self.num_cached_tokens if first else 0,
        )

    def _load(self) -> Load:
        drafts = {"num_drafts": 10, "num_draft_tokens": 20, "num_accepted_tokens": 13, "num_accepted_by_position": [9, 4]}
        pages = {"num_pages": 64, "num_held_pages": len(self._running) + 7, "num_cached_pages": 2}
        pages |= {"num_transfer_pages": 3, "num_quarantined_pages": 4}
        return Load(num_running=len(self._running), num_preemptions=3, **pages, **drafts)

    def _send(self, message):
        self._socket.send(self._encoder.encode(message))


REGISTER = Register(
    protocol_version=PROTOCOL_VERSION,
    instance="unified-0",
    role="unified",
    dp_rank=0,
    model_fingerprint="tiny-abc",
    weight_version=7,
    vocab_size=4096,
    max_model_len=4096,
    max_num_seqs=256,
    page_size=64,
    num_pages=64,
    pid=1,
)


def position(token_id: int, num_top: int) -> PositionLogprobs:
    """Made up and easy to check: the token is the second most likely one, its successors in the vocabulary are the others."""
    top = [token_id + 1, token_id, *range(token_id + 2, token_id + num_top)][:num_top]
    return PositionLogprobs([token_id, *top], [-1.0, *([-0.5, -1.0] + [-2.0 - i for i in range(num_top)])[:num_top]], 2)


def joined(lists) -> list:
    return list(chain.from_iterable(lists))


class Served:
    """A frontend in a thread of its own, with its engines."""

    def __init__(self, tokenizer: Tokenizer, spawn=None, **options):
        self.tokenizer = tokenizer
        self.engines: list[FakeEngine] = []
        self.exit_code: int | None = None
        self.frontend = Frontend(ServerOptions(**{"model_path": str(MODEL), "port": 0, **options}), spawn)
        self.url = self.frontend.url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._pool = ThreadPoolExecutor(8)
        api_key = (options.get("api_key") or ("none",))[0]
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S, headers={"authorization": f"Bearer {api_key}"})
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0, timeout=WAIT_S)
        # Answered as soon as the port is served; the engine client exists then. Who could not start its engines may have ended already.
        with contextlib.suppress(httpx.ConnectError):
            assert self.http.get("/health").status_code == 503

    def _run(self):
        self.exit_code = self._loop.run_until_complete(self.frontend.run(handle_signals=False))
        self._loop.close()

    def engine(self, reply: str | list[int] = TEXT, **options) -> FakeEngine:
        ids = [*self.encode(reply), 1] if isinstance(reply, str) else reply
        engine = FakeEngine(self.frontend.client.address, ids, **options)
        self.engines.append(engine)
        self.call(self.frontend.client.wait_for_engines(sum(not each._ended.is_set() for each in self.engines)))
        return engine

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def call(self, coroutine):
        """Run in the frontend's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, WAIT_S), self._loop).result(WAIT_S)

    def in_background(self, call: Callable) -> Future:
        return self._pool.submit(call)

    def shut_down(self):
        self._loop.call_soon_threadsafe(self.frontend.shut_down)

    def wait_for_exit(self) -> int:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the frontend still runs"
        return self.exit_code

    def wait_until_idle(self):
        self.call(self.frontend.state.wait_until_idle())

    def remove_engines(self):
        for engine in self.engines:
            if not engine._ended.is_set():
                engine.kill()
        self.engines.clear()

        async def forget():
            self.frontend.client.fail_all("the test is over")
            await self.frontend.state.wait_until_idle()

        self.call(forget())

    def close(self):
        for engine in self.engines:
            if not engine._ended.is_set():
                engine.kill()
        self.http.close()
        self.openai.close()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.frontend._finish, 0, "the test is over")
        self.wait_for_exit()
        self._pool.shutdown()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(MODEL)


@pytest.fixture
def serve(tokenizer):
    """Start a frontend with the given options; all are ended after the test."""
    started: list[Served] = []

    def start(**options) -> Served:
        started.append(Served(tokenizer, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture(scope="session")
def lasting(tokenizer):
    """One frontend with default options for all tests that do not end it: starting one takes longer than most of them."""
    server = Served(tokenizer)
    yield server
    server.close()


@pytest.fixture
def server(lasting) -> Served:
    """A frontend with default options and no engine yet."""
    yield lasting
    lasting.remove_engines()
