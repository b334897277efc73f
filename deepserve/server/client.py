"""Asyncio client of the engine ranks: they connect and register, the frontend submits, streams and aborts.

One ROUTER socket for all engines. An engine is known from its `Register` to its `Goodbye`, or until it has been silent for
`silence_limit_s` (`deepserve serve`: the step timeout, 120 s unless told otherwise); then its requests end with an error output, so that
no client waits for a process that is gone. A rank beats every second, also in a long step: only one that is stopped or hangs is silent. A
rank that dies is seen by whoever started it, at once.
"""

import asyncio
import logging
import secrets
import time

import msgspec
import zmq

from deepserve import messages
from deepserve.engine.request import Limits, SamplingParams, SequenceOutput
from deepserve.messages import PROTOCOL_VERSION, Goodbye, Heartbeat, Load, Outputs, Register
from deepserve.server.router import Router
from deepserve.server.stats import EngineStats
from deepserve.server.stream import EngineRequest, OutputStream

log = logging.getLogger("deepserve.server")

# Silence is counted in checks of this loop, so a frontend that was itself stopped or busy does not blame the engines.
CHECKS_PER_LIMIT = 10
MESSAGES_PER_TURN = 64
SERVING_ROLES = ("unified",)


class NoEngine(RuntimeError):
    """No engine rank can take a request now."""


class Engine:
    """One registered engine rank."""

    def __init__(self, identity: bytes, register: Register, label: str, stats: EngineStats):
        self.identity = identity
        self.register = register
        self.label = label  # of the metrics
        self.stats = stats
        self.load = Load()
        self.silent_checks = 0
        self.requests: dict[str, EngineRequest] = {}

    @property
    def num_sequences(self) -> int:
        # Our own count is exact but knows only this frontend; the report knows all frontends but is up to a heartbeat old.
        ours = sum(len(request.open) for request in self.requests.values())
        return max(ours, self.load.num_running + self.load.num_waiting)

    @property
    def num_queued_tokens(self) -> int:
        return sum(request.num_prompt for request in self.requests.values() if not request.prefilled)

    @property
    def num_cache_tokens(self) -> int:
        return self.register.num_pages * self.register.page_size

    @property
    def num_free_tokens(self) -> int:
        return self.num_cache_tokens - self.load.num_held_pages * self.register.page_size

    @property
    def name(self) -> str:
        return f"engine {self.register.instance!r} rank {self.register.dp_rank} (pid {self.register.pid})"


class EngineClient:
    """Made inside a running event loop; `close` it there."""

    def __init__(self, *, bind: str = "tcp://127.0.0.1:*", silence_limit_s: float = 10.0):
        self.engines: dict[bytes, Engine] = {}
        self.stats: dict[str, EngineStats] = {}  # by engine label; outlive the engine
        self.draining = False
        self._silence_limit_s = silence_limit_s
        self._lost: dict[bytes, Engine] = {}  # dropped for silence; they may only have been suspended
        self._router = Router()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages.FromEngine)
        self._id_prefix = secrets.token_hex(4)  # several frontends share an engine
        self._num_submitted = 0
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to an engine that is gone raises
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the limit of requests in flight
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.bind(bind)
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._fd = self._socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._read)
        self._checks = self._loop.call_later(silence_limit_s / CHECKS_PER_LIMIT, self._check_silence)

    # -- requests --

    @property
    def limits(self) -> Limits | None:
        """What every engine can take; None while there is none."""
        serving = [engine.register for engine in self._serving()]
        if not serving:
            return None
        return Limits(
            vocab_size=min(r.vocab_size for r in serving),
            max_model_len=min(r.max_model_len for r in serving),
            max_seq_tokens=min(r.num_pages * r.page_size for r in serving),
        )

    @property
    def can_serve(self) -> bool:
        return not self.draining and any(True for _ in self._serving())

    @property
    def fingerprint(self) -> str:
        """Model and weight version of what answers, empty while nothing does."""
        for engine in self._serving():
            return f"{engine.register.model_fingerprint}-w{engine.register.weight_version}"
        return ""

    def submit(
        self, prompt_token_ids: list[int], params: SamplingParams, cache_salt: str = "", *, stream: OutputStream | None = None
    ) -> OutputStream:
        """Send a request that `validate` passed. `stream` joins it to the outputs of an earlier one. Raises NoEngine."""
        stream = self.stream() if stream is None else stream
        self.submit_to(stream, prompt_token_ids, params, cache_salt)
        return stream

    def stream(self) -> OutputStream:
        return OutputStream(self._abort)

    def submit_to(self, stream: OutputStream, prompt_token_ids: list[int], params: SamplingParams, cache_salt: str = "") -> str:
        """Like `submit`, and gives the id that the outputs will carry."""
        request_id = f"{self._id_prefix}-{self._num_submitted}"
        self._num_submitted += 1
        message = messages.Submit(request_id, prompt_token_ids, params, cache_salt, time.time())
        # An engine that proves to be gone is removed; the next one is asked.
        while engine := self._router.pick(self._serving(), prompt_token_ids, cache_salt):
            if self._send_or_remove(engine, message):
                break
        else:
            raise NoEngine("no engine can take requests now")
        request = EngineRequest(
            request_id=request_id,
            engine=engine,
            stats=engine.stats,
            stream=stream,
            num_prompt=len(prompt_token_ids),
            n=params.n,
            start_s=time.perf_counter(),
        )
        engine.requests[request_id] = stream.requests[request_id] = request
        return request_id

    def abort(self, stream: OutputStream):
        stream.close(time.perf_counter())

    @property
    def silent(self) -> str | None:
        """Name of an engine that was dropped for silence and has not spoken since."""
        return next((engine.name for engine in self._lost.values()), None)

    def fail_all(self, reason: str):
        """End every request with an error output and forget all engines."""
        for engine in list(self.engines.values()):
            self._remove(engine, reason)

    def drain(self):
        """Tell every engine to finish what it has and end."""
        self.draining = True
        self._broadcast(messages.Drain())

    def stop(self):
        self._broadcast(messages.Stop())

    async def wait_for_engines(self, count: int):
        while len(self.engines) < count:
            await self.wait_for_change()

    async def wait_for_change(self):
        """Until an engine joins or leaves."""
        await self._changed.wait()

    def close(self):
        self._checks.cancel()
        self._loop.remove_reader(self._fd)
        self.fail_all("the server ends")
        self._socket.close()
        self._context.term()

    # -- wire --

    def _serving(self):
        return (engine for engine in self.engines.values() if engine.register.role in SERVING_ROLES)

    def _send(self, identity: bytes, message: messages.ToEngine) -> bool:
        """False when nobody is at the other end any more."""
        try:
            self._socket.send_multipart((identity, self._encoder.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.error("an engine cannot be reached: %s", error)
            return False
        # The socket's descriptor is edge-triggered and sending may swallow the edge of a message that came in meanwhile.
        self._loop.call_soon(self._read)
        return True

    def _send_or_remove(self, engine: Engine, message: messages.ToEngine) -> bool:
        if self._send(engine.identity, message):
            return True
        self._remove(engine, f"{engine.name} cannot be reached")
        return False

    def _broadcast(self, message: messages.ToEngine):
        for engine in list(self.engines.values()):
            self._send_or_remove(engine, message)

    def _abort(self, requests: list[EngineRequest]):
        by_engine: dict[Engine, list[str]] = {}
        for request in requests:
            by_engine.setdefault(request.engine, []).append(request.request_id)
        for engine, request_ids in by_engine.items():
            if engine.identity in self.engines:
                self._send_or_remove(engine, messages.Abort(request_ids))

    def _read(self):
        """Read until nothing is left; give the other callbacks of the loop a turn in between."""
        for _ in range(MESSAGES_PER_TURN):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(frames)
        self._loop.call_soon(self._read)

    def _on_frames(self, frames: list[bytes]):
        identity, payload = frames[0], frames[-1]
        try:
            message = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            log.error("a message from an engine cannot be read and is ignored: %s%s", error, _other_version(payload))
            return
        if type(message) is Register:
            self._on_register(identity, message)
            return
        if type(message) is Heartbeat:
            identity = self._identity_of(message)
        engine = self.engines.get(identity) or self._readmit(identity)
        if engine is None:
            return
        engine.silent_checks = 0
        if type(message) is Outputs:
            engine.load = message.load
            now_s = time.perf_counter()
            requests = engine.requests
            for output in message.outputs:
                request = requests.get(output.request_id)
                if request is not None:
                    request.receive(output, now_s)
        elif type(message) is Heartbeat:
            engine.load = message.load
        elif type(message) is Goodbye:
            self._remove(engine, f"{engine.name} ended" + (f": {message.error}" if message.error else ""))

    # -- who is there --

    def _on_register(self, identity: bytes, register: Register):
        peers = [engine for engine in self.engines.values() if engine.identity != identity]
        refusal = _refusal(register, peers)
        if refusal:
            log.error("refused engine %r rank %d (pid %d): %s", register.instance, register.dp_rank, register.pid, refusal)
            self._send(identity, messages.Stop())
            return
        place = (register.instance, register.dp_rank)
        for engine in list(self.engines.values()):
            if engine.identity == identity or (engine.register.instance, engine.register.dp_rank) == place:
                self._remove(engine, f"{engine.name} was replaced by a new one")
        self._lost = {key: lost for key, lost in self._lost.items() if (lost.register.instance, lost.register.dp_rank) != place}
        taken = {engine.label for engine in self.engines.values()}
        label = str(register.dp_rank)
        if label in taken:
            label = f"{register.instance}-{register.dp_rank}"
        stats = self.stats.setdefault(label, EngineStats())
        engine = self.engines[identity] = Engine(identity, register, label, stats)
        log.info("%s joined: %d pages of %d tokens", engine.name, register.num_pages, register.page_size)
        self._notify()

    def _identity_of(self, heartbeat: Heartbeat) -> bytes:
        """The identity under which the rank of a heartbeat registered, empty if it did not."""
        place = (heartbeat.instance, heartbeat.dp_rank)
        for identity, engine in (*self.engines.items(), *self._lost.items()):
            if (engine.register.instance, engine.register.dp_rank) == place:
                return identity
        return b""

    def _readmit(self, identity: bytes) -> Engine | None:
        engine = self._lost.pop(identity, None)
        if engine is None:
            return None
        log.warning("%s speaks again", engine.name)
        self.engines[identity] = engine
        self._notify()
        return engine

    def _check_silence(self):
        self._checks = self._loop.call_later(self._silence_limit_s / CHECKS_PER_LIMIT, self._check_silence)
        self._read()
        for engine in list(self.engines.values()):
            engine.silent_checks += 1
            if engine.silent_checks > CHECKS_PER_LIMIT:
                # What it still runs has no reader any more; the message waits in the socket should it only be suspended.
                if engine.requests:
                    self._send(engine.identity, messages.Abort(list(engine.requests)))
                self._remove(engine, f"{engine.name} has been silent for {self._silence_limit_s:g} s")
                self._lost[engine.identity] = engine

    def _remove(self, engine: Engine, reason: str):
        if self.engines.pop(engine.identity, None) is None:
            return
        (log.error if engine.requests else log.info)("%s; %d of its requests fail", reason, len(engine.requests))
        now_s = time.perf_counter()
        for request in list(engine.requests.values()):
            for index in list(request.open):
                request.receive(SequenceOutput(request.request_id, index, [], finish_reason="error", error=reason), now_s)
        self._notify()

    def _notify(self):
        self._changed.set()
        self._changed = asyncio.Event()


def _refusal(register: Register, peers: list[Engine]) -> str:
    if register.protocol_version != PROTOCOL_VERSION:
        return f"it speaks protocol version {register.protocol_version}, this frontend speaks {PROTOCOL_VERSION}"
    for peer in peers:
        if peer.register.model_fingerprint != register.model_fingerprint:
            return f"its model {register.model_fingerprint} is not the {peer.register.model_fingerprint} of {peer.name}"
    return ""


def _other_version(payload: bytes) -> str:
    """A hint for messages that do not fit: a `Register` of another protocol version."""
    try:
        fields = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, RecursionError):
        return ""
    if isinstance(fields, list) and len(fields) > 1 and fields[0] == "register" and fields[1] != PROTOCOL_VERSION:
        return f" (it speaks protocol version {fields[1]!r}, this frontend speaks {PROTOCOL_VERSION})"
    return ""
