"""The life of a frontend process: listen, start the local engines, serve, drain, end with an exit code that says how it went."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Collection
from typing import Protocol

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deepserve.server.app import create_app
from deepserve.server.client import EngineClient
from deepserve.server.state import ServerOptions, ServerState

log = logging.getLogger("deepserve.server")

WATCH_S = 0.1  # between looks at the engine processes
GRACE_S = 10.0  # that engine processes get to end
HURRY_S = 2.0  # that they get after a death: whoever lives ends at once, or stands still
BACKLOG = 4096  # connections that wait to be accepted
FLUSH_S = 2.0  # for the last error events to reach their clients
MAX_HEAD_BYTES = 256 << 10  # of a request: its line and headers
UNREAD_S = 60.0  # that a client may leave what was sent to it unread; also ends connections to machines that are gone


class Death(Protocol):
    """An engine process that ended; as text it says which one and how."""

    code: int  # exit code, 128 + its number for a signal
    outlived: Collection[int]  # processes that are gone while the others go on; empty if this ends all


class Spawn(Protocol):
    """Starts and watches the engine processes of this machine."""

    def start(self, frontend_address: str) -> None: ...

    def poll(self, serving: Collection[int]) -> "Death | None":
        """The process whose end ended the others, None while there are others. serving: processes that have registered."""

    def kill(self, pid: int) -> None:
        """End a process that stands still, where the others go on."""

    def scale(self, dp: int) -> None:
        """Have so many DP replicas from now on: more are started, or some finish what they have and end. Raises ValueError."""

    def stop(self, grace_s: float) -> None: ...


class Frontend:
    """One server. `run` serves until a signal, `shut_down` or the death of an engine process, and returns the exit code."""

    def __init__(self, options: ServerOptions, spawn: Spawn | None):
        """Binds the port at once: one that is taken is known before a model is loaded. Raises OSError."""
        self.options = options
        self.client: EngineClient | None = None
        self.state: ServerState | None = None
        self._spawn = spawn
        self._socket = _listen(options.host, options.port)
        self.host, self.port = self._socket.getsockname()[:2]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Future | None = None  # result: exit code and last line
        self._num_signals = 0

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    async def run(self, *, handle_signals: bool = True) -> int:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.create_future()
        self.client = EngineClient(
            bind=self.options.control_address,
            silence_limit_s=self.options.engine_silence_limit_s,
            quiet_limit_s=self.options.engine_quiet_limit_s,
            secret=self.options.secret,
            hand_off=self.options.hand_off,
        )
        try:
            self.state = ServerState(self.options, self.client)
            self.state.scale_local = None if self._spawn is None else self._spawn.scale
            server = _Server(_uvicorn_config(self.state))
            with self._signals(handle_signals):
                code, line = await self._serve(server)
        finally:
            self.client.close()
            self._socket.close()
        _say(line)
        return code

    async def _serve(self, server: "_Server") -> tuple[int, str]:
        """Exit code and last line."""
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        watching = asyncio.create_task(self._watch_engines())
        serving.add_done_callback(lambda _: self._finish(1, "the HTTP server stopped by itself"))
        try:
            _say(f"listening on {self.url}")
            code, line = await self._end
            self.state.draining = True
            if code == 0 and self._spawn is not None:
                self.client.stop()  # the instance ends with its frontend; others find the next one
            self.client.fail_all(line)  # error events instead of cut streams; after a drain there is nobody left
            server.should_exit = True
            await serving
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            if self._spawn is not None:
                await asyncio.to_thread(self._spawn.stop, self._grace_s)
        return code, line

    async def _watch_engines(self):
        """Starts the engine processes and ends everything when one of them ends."""
        try:
            if self._spawn is not None:
                await asyncio.to_thread(self._spawn.start, self.client.address)
            said_ready = False
            while not self._end.done():  # then processes end because they were told to
                death = None if self._spawn is None else self._spawn.poll({e.register.pid for e in self.client.engines.values()})
                if death is not None and death.outlived:
                    self.client.forget(death.outlived, str(death))
                elif death is not None:
                    self._finish(death.code if 0 < death.code < 256 else 1, f"{death} and was not told to; the server stopped")
                    return
                if self._spawn is not None and (stuck := self.client.silent):
                    # Its process lives, so it hangs or is suspended; requests have failed already.
                    if not stuck.register.outlived:  # new ones would find nobody
                        limit_s = self.options.engine_silence_limit_s
                        self._finish(1, f"{stuck.name} made no progress for {limit_s:g} s; the server stopped")
                        return
                    self._spawn.kill(stuck.register.pid)
                if not said_ready and self.state.ready:
                    said_ready = True
                    _say("ready")
                await asyncio.sleep(WATCH_S)
        except Exception as error:
            log.exception("the engine processes cannot be started or watched")
            self._finish(1, f"the engine processes cannot be started or watched: {error}")

    # -- ending --

    def shut_down(self):
        """Finish what runs, refuse what is new, then end with code 0. Call it in the loop."""
        if not self.state.draining:
            self.state.draining = True
            _say(f"draining {self.state.num_in_flight} requests")
            self._drain = self._loop.create_task(self._wait_for_drain())

    async def _wait_for_drain(self):
        try:
            await asyncio.wait_for(self.state.wait_until_idle(), self.options.shutdown_timeout_s)
        except TimeoutError:
            line = f"stopped with {self.state.num_in_flight} requests unfinished after {self.options.shutdown_timeout_s:g} s"
        else:
            line = "stopped, every request was finished"
        self._finish(0, line)

    @property
    def _grace_s(self) -> float:
        if self._num_signals > 1:
            return 0.0
        ended_well = self._end.done() and self._end.result()[0] == 0
        return GRACE_S if ended_well else HURRY_S

    def _finish(self, code: int, line: str):
        if not self._end.done():
            self._end.set_result((code, line))

    def _on_signal(self, number: int):
        self._num_signals += 1
        if self._num_signals == 1:
            self.shut_down()
        else:
            self._finish(128 + number, "stopped at once by a second signal")

    @contextlib.contextmanager
    def _signals(self, handle: bool):
        numbers = (signal.SIGTERM, signal.SIGINT) if handle else ()
        for number in numbers:
            self._loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                self._loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        """Signals are ours: uvicorn's would close the port before the drain."""
        yield


class _Protocol(HttpToolsProtocol):
    """Refuses a request whose head does not end: the parser would hold all of it."""

    _num_head_bytes: int | None = None  # None: no head is on its way

    def data_received(self, data: bytes):
        super().data_received(data)
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request's line and headers have more than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self):
        super().on_message_begin()
        self._num_head_bytes = 0

    def on_headers_complete(self):
        self._num_head_bytes = None
        super().on_headers_complete()


def run_server(options: ServerOptions, spawn: Spawn | None) -> int:
    """Serve until the end and return the exit code; the last line on stderr says why it ended."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        frontend = Frontend(options, spawn)
        return uvloop.run(frontend.run())
    except (OSError, ValueError) as error:
        _say(f"cannot serve: {error}")
        return 1


def _uvicorn_config(state: ServerState) -> uvicorn.Config:
    options = state.options
    return uvicorn.Config(
        create_app(state),
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,  # the program's own logging holds for uvicorn too
        log_level="info" if options.access_log else "warning",
        access_log=options.access_log,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=FLUSH_S,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    # The protocol is named because asyncio turns Nagle's delay off only where it is; with the delay, short replies take 40 ms.
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _say(line: str):
    # Whoever read the log may be gone; that must not keep the server from draining or ending.
    with contextlib.suppress(OSError):
        print(f"deepserve: {line}", file=sys.stderr, flush=True)
