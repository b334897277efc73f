"""Asyncio client of the engine ranks: they connect and register, the frontend submits, streams and aborts.

One ROUTER socket for all engines. An engine is known from its `Register` to its `Goodbye`, or until its connection breaks, or until it has
been silent for `silence_limit_s`; then its requests end with an error output, so that no client waits for a process that is gone. A rank
beats every second, also in a long step: only one that is stopped, hangs or is cut off is silent.

Where `quiet_limit_s` is given, an instance that has a rank silent for so long gets no requests until that rank speaks again. A request
that is lost before anything of it came back is sent to another instance, once.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Collection, Iterator

import msgspec
import zmq

from deepserve import messages
from deepserve.control import Doorman, notice_dead_links, secure_server
from deepserve.engine.request import Limits, SamplingParams
from deepserve.messages import Died, ExpertBalance, Goodbye, Guardian, Heartbeat, Leaving, Outputs, Place, Register, Relay
from deepserve.server.dispatch import DECODING, Dispatcher, HandOffOptions
from deepserve.server.guardians import Guardians
from deepserve.server.registry import Engine, other_version, refusal_of
from deepserve.server.stats import EngineStats
from deepserve.server.stream import EngineRequest, OutputStream

log = logging.getLogger("deepserve.server")

# Silence is summed up over checks of this loop, each at most two intervals long, so a frontend that was itself stopped does not blame the
# engines.
CHECK_S = 0.5  # or less, so that the smaller limit is
CHECKS_PER_LIMIT = 10  # long
PROBE_CHECKS = 5  # without a word before an engine's connection is tried
MESSAGES_PER_TURN = 64


class NoEngine(RuntimeError):
    """No engine rank can take a request now."""


class EngineClient:
    """Made inside a running event loop; `close` it there."""

    def __init__(
        self,
        *,
        bind: str = "tcp://127.0.0.1:*",
        silence_limit_s: float = 10.0,
        quiet_limit_s: float | None = None,
        secret: str = "",
        hand_off: HandOffOptions | None = None,
    ):
        """secret: shared with the ranks, for addresses that other machines reach. Raises OSError when `bind` is taken."""
        self.engines: dict[bytes, Engine] = {}
        self.stats: dict[str, EngineStats] = {}  # by engine label; outlive the engine
        self.guardians = Guardians(self._send)
        self._silence_limit_s = silence_limit_s
        limits_s = [silence_limit_s] if quiet_limit_s is None else [silence_limit_s, quiet_limit_s]
        self._check_s = min(CHECK_S, min(limits_s) / CHECKS_PER_LIMIT)
        self._checked_s = time.monotonic()
        self._quiet_limit_s = quiet_limit_s
        self._quiet: set[str] = set()  # instances with a rank that has not spoken for a while
        self._lost: dict[bytes, Engine] = {}  # dropped for silence; they may only have been suspended
        self._dispatcher = Dispatcher(self._send_or_remove, self._serving, hand_off or HandOffOptions())
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
        secure_server(self._socket, secret)
        if quiet_limit_s is not None:
            notice_dead_links(self._socket, silence_limit_s)
        self._doorman = Doorman(self._socket) if secret else None
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            if self._doorman is not None:
                self._doorman.close()
            self._context.destroy(linger=0)
            raise OSError(f"cannot listen for engines on {bind}: {error}") from error
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._fd = self._socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._read)
        if self._doorman is not None:
            self._loop.add_reader(self._doorman.fd, self._doorman.read)
            self._doorman.read()  # the descriptor tells of news after the first look
        self._checks = self._loop.call_later(self._check_s, self._check_silence)

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
        return not self._dispatcher.draining and any(engine.register.role in DECODING for engine in self._serving())

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
        return OutputStream(self._dispatcher.abort)

    def submit_to(self, stream: OutputStream, prompt_token_ids: list[int], params: SamplingParams, cache_salt: str = "") -> str:
        """Like `submit`, and gives the id that the outputs will carry."""
        request_id = f"{self._id_prefix}-{self._num_submitted}"
        self._num_submitted += 1
        message = messages.Submit(request_id, prompt_token_ids, params, cache_salt)
        request = EngineRequest(message=message, stream=stream, start_s=time.perf_counter())
        if not self._dispatcher.place(request):
            raise NoEngine("no engine can take requests now")
        stream.requests[request_id] = request
        return request_id

    def abort(self, stream: OutputStream):
        stream.close(time.perf_counter())

    @property
    def silent(self) -> Engine | None:
        """One that was dropped for silence and has not spoken since."""
        return next(iter(self._lost.values()), None)

    def fail_all(self, reason: str):
        """End every request with an error output and forget all engines."""
        dispatcher = self._dispatcher
        was_draining, dispatcher.draining = dispatcher.draining, True
        for engine in list(self.engines.values()):
            self._remove(engine, reason)
        dispatcher.draining = was_draining

    def forget(self, pids: Collection[int], reason: str):
        """These engine processes are gone, and their peers go on."""
        for engine in list(self.engines.values()):
            if engine.register.pid in pids:
                self._remove(engine, reason)
        self._lost = {key: engine for key, engine in self._lost.items() if engine.register.pid not in pids}

    def drain(self):
        """Tell every engine to finish what it has and end."""
        self._dispatcher.draining = True
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
        if self._doorman is not None:
            self._loop.remove_reader(self._doorman.fd)
            self._doorman.close()
        self.fail_all("the server ends")
        self._socket.close()
        self._context.term()

    # -- wire --

    def _serving(self) -> Iterator[Engine]:
        return (engine for engine in self.engines.values() if not self._is_out(engine))

    def _is_out(self, engine: Engine) -> bool:
        """It gets nothing new. One that is being lost is still known, so that it hears of what it has lost."""
        return engine.leaving or engine.instance in self._quiet or engine.silent_s > self._silence_limit_s

    def _engine_at(self, place: Place | None) -> Engine | None:
        key = None if place is None else (place.instance, place.dp_rank)
        return next((engine for engine in self.engines.values() if engine.place == key), None)

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
        if engine.identity in self.engines and self._send(engine.identity, message):
            return True
        self._remove(engine, f"{engine.name} cannot be reached")
        return False

    def _broadcast(self, message: messages.ToEngine):
        for engine in list(self.engines.values()):
            self._send_or_remove(engine, message)

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
            log.error("a message from an engine cannot be read and is ignored: %s%s", error, other_version(payload))
            return
        if type(message) is Register:
            self._on_register(identity, message)
            return
        if type(message) is Guardian:
            self.guardians.on_word(identity, message)
            return
        if type(message) is Died:
            self.forget(message.pids, message.reason)
            return
        if type(message) is Heartbeat:
            identity = self._identity_of(message)
        engine = self.engines.get(identity) or self._readmit(identity)
        if engine is None:
            return
        engine.silent_s = 0.0
        if type(message) is Outputs:
            engine.load = message.load
            now_s = time.perf_counter()
            requests = engine.requests
            for output in message.outputs:
                request = requests.get(output.request_id)
                if request is not None and self._dispatcher.begun(request):
                    request.receive(output, now_s)
        elif type(message) is Heartbeat:
            engine.load = message.load
        elif type(message) is ExpertBalance:
            engine.balance = message
        elif type(message) is Relay:
            self._dispatcher.relay(engine, message, self._engine_at(message.peer))
        elif type(message) is Leaving:
            engine.leaving = True
            log.info("%s is leaving; %d requests are left there", engine.name, len(engine.requests))
        elif type(message) is Goodbye:
            self._remove(engine, f"{engine.name} ended" + (f": {message.error}" if message.error else ""))

    # -- who is there --

    def _on_register(self, identity: bytes, register: Register):
        peers = [engine for engine in self.engines.values() if engine.identity != identity]
        refusal = refusal_of(register, peers)
        if refusal:
            log.error("refused engine %r rank %d (pid %d): %s", register.instance, register.dp_rank, register.pid, refusal)
            self._send(identity, messages.Stop())
            return
        place = (register.instance, register.dp_rank)
        for engine in list(self.engines.values()):
            if engine.identity == identity or engine.place == place:
                self._remove(engine, f"{engine.name} was replaced by a new one")
        self._lost = {key: lost for key, lost in self._lost.items() if lost.place != place}
        label = self._label(register)
        stats = self.stats.setdefault(label, EngineStats())
        engine = self.engines[identity] = Engine(identity, register, label, stats)
        log.info("%s joined: %d pages of %d tokens", engine.name, register.num_pages, register.page_size)
        self._notify()

    def _identity_of(self, heartbeat: Heartbeat) -> bytes:
        """The identity under which the rank of a heartbeat registered, empty if it did not."""
        place = (heartbeat.instance, heartbeat.dp_rank)
        for identity, engine in (*self.engines.items(), *self._lost.items()):
            if engine.place == place:
                return identity
        return b""

    def _label(self, register: Register) -> str:
        """Of a rank's metrics, the same whenever it comes back: a number, as with vLLM, which in a cluster follows the instance's name."""
        return str(register.dp_rank) if self._quiet_limit_s is None else f"{register.instance}-{register.dp_rank}"

    def _readmit(self, identity: bytes) -> Engine | None:
        engine = self._lost.pop(identity, None)
        if engine is None:
            return None
        log.warning("%s speaks again", engine.name)
        self.engines[identity] = engine
        self._notify()
        return engine

    def _check_silence(self):
        self._checks = self._loop.call_later(self._check_s, self._check_silence)
        self._read()
        now_s = time.monotonic()
        passed_s, self._checked_s = min(now_s - self._checked_s, 2 * self._check_s), now_s
        for engine in (*self.engines.values(), *self._lost.values()):
            engine.silent_s += passed_s
        for engine in list(self.engines.values()):
            if engine.silent_s > self._silence_limit_s:
                self._lose(engine)
            elif engine.silent_s >= PROBE_CHECKS * self._check_s:
                self._send_or_remove(engine, messages.Abort([]))  # forgets nothing: the sending shows whether anybody is there
        if self._quiet_limit_s is not None:
            self._check_quiet(self._quiet_limit_s)

    def _check_quiet(self, limit_s: float):
        known = (*self.engines.values(), *self._lost.values())
        quiet = {engine.instance for engine in known if engine.silent_s > limit_s}
        for instance in quiet - self._quiet:
            log.warning("instance %r has been quiet for %g s and gets no requests", instance, limit_s)
        if quiet != self._quiet:
            self._quiet = quiet
            self._notify()
        for engine in list(self.engines.values()):
            if engine.instance in quiet:
                self._dispatcher.move(engine, f"{engine.name} is quiet")

    def _lose(self, engine: Engine):
        """For silence; it may only be suspended. Its peers cannot go on without it either, unless they outlive it."""
        reason = f"{engine.name} has been silent for {self._silence_limit_s:g} s"
        stuck = [engine]
        if self._quiet_limit_s is not None and engine.lost_with_it:
            stuck = [peer for peer in self.engines.values() if peer.instance == engine.instance]
        for peer in stuck:
            # It is told as well: the message waits in the socket should it only be suspended.
            self._dispatcher.lost(peer, reason)
        if self.engines.pop(engine.identity, None) is not None:
            self._lost[engine.identity] = engine
            self._notify()

    def _remove(self, engine: Engine, reason: str):
        if self.engines.pop(engine.identity, None) is not None:
            self._dispatcher.lost(engine, reason)
            self._notify()

    def _notify(self):
        self._changed.set()
        self._changed = asyncio.Event()
