"""The process of one engine rank: sockets around `Engine.step()`.

Started by `deepserve.spawn` as `python -m deepserve.engine.loop`, with one line of JSON on stdin: `RankOptions`. Stdin stays open as a
lifeline: when whoever started the rank is gone, it ends, and so does the rank.
"""

import logging
import os
import signal
import sys
import threading
from collections import defaultdict
from typing import BinaryIO

import msgspec
import zmq

from deepserve.config import EngineArgs
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.request import SequenceOutput
from deepserve.messages import PROTOCOL_VERSION, Abort, Drain, FromEngine, Goodbye, Heartbeat, Load, Outputs, Register, Submit, ToEngine
from deepserve.messages import Stop as StopNow
from deepserve.model.checkpoint import fingerprint

logger = logging.getLogger("deepserve.engine")

HEARTBEAT_S = 1.0
LINGER_MS = 1000  # for the last messages to leave
EXIT_ORPHANED = 3  # the process that started this rank is gone


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told at start."""

    args: EngineArgs
    frontends: list[str]  # ZMQ addresses to connect to
    instance: str = "local"
    role: str = "unified"
    dp_rank: int = 0


class Heart(threading.Thread):
    """Beats to every frontend, so that a rank in a long step is slow and not dead. It has sockets of its own: ZMQ's are not shared."""

    def __init__(self, context: zmq.Context, options: RankOptions):
        super().__init__(name="heart", daemon=True)
        self.load = Load()  # replaced by the engine thread after each step
        self._options = options
        self._context = context
        self._stopped = threading.Event()

    def run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        sockets = [_connect(self._context, address) for address in self._options.frontends]
        while not self._stopped.wait(HEARTBEAT_S):
            beat = encoder.encode(Heartbeat(self._options.instance, self._options.dp_rank, self.load))
            for socket in sockets:
                socket.send(beat)
        for socket in sockets:
            socket.close(LINGER_MS)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


class EngineLoop:
    """Receives, steps, sends, until told to end. Requests of a frontend are answered to that frontend."""

    def __init__(self, engine: Engine, options: RankOptions, context: zmq.Context):
        self.engine, self.options = engine, options
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._sockets = [_connect(context, address) for address in options.frontends]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._home: dict[str, zmq.Socket] = {}  # request -> who sent it
        self._draining = self._stopping = False
        self._heart = Heart(context, options)

    def run(self) -> None:
        """Until `Stop`, or `Drain` and nothing left to do."""
        self._register()
        self._heart.start()
        try:
            while not self._stopping and not (self._draining and not self.engine.has_work):
                outputs = self.engine.step(self._receive)
                self._heart.load = self.engine.load()
                self._send_outputs(outputs)
        finally:
            self._heart.stop()

    def close(self, error: str = "") -> None:
        """Say goodbye and close the sockets."""
        for socket in self._sockets:
            self._send(socket, Goodbye(error))
            socket.close(LINGER_MS)

    def _register(self) -> None:
        config, engine = self.engine.config, self.engine
        message = Register(
            protocol_version=PROTOCOL_VERSION,
            instance=self.options.instance,
            role=self.options.role,
            dp_rank=self.options.dp_rank,
            model_fingerprint=model_fingerprint(engine),
            weight_version=engine.pages.weight_version,
            vocab_size=config.model.vocab_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.args.max_num_seqs,
            page_size=config.page_size,
            num_pages=engine.pages.num_pages,
            pid=os.getpid(),
        )
        for socket in self._sockets:
            self._send(socket, message)

    def _receive(self) -> None:
        """Take every message that is there; wait for one if there is nothing else to do."""
        timeout_ms = 0 if self.engine.has_work else None
        for socket, _ in self._poller.poll(timeout_ms):
            while True:
                try:
                    payload = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._on_message(socket, self._decoder.decode(payload))

    def _on_message(self, socket: zmq.Socket, message: ToEngine) -> None:
        match message:
            case Submit():
                self._home[message.request_id] = socket
                self.engine.submit(message)
            case Abort():
                self.engine.abort(message.request_ids)
                for request_id in message.request_ids:
                    self._home.pop(request_id, None)
            case Drain():
                self._draining = True
            case StopNow():
                self._stopping = True

    def _send_outputs(self, outputs: list[SequenceOutput]) -> None:
        if not outputs:
            return
        by_home: dict[zmq.Socket, list[SequenceOutput]] = defaultdict(list)
        for output in outputs:
            by_home[self._home[output.request_id]].append(output)
        for socket, mine in by_home.items():
            self._send(socket, Outputs(mine, self._heart.load))
        for output in outputs:
            if output.finish_reason is not None and not self.engine.knows(output.request_id):
                self._home.pop(output.request_id, None)

    def _send(self, socket: zmq.Socket, message: FromEngine) -> None:
        socket.send(self._encoder.encode(message))


def _connect(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)  # a frontend that reads slowly must not stop a step
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    return socket


def model_fingerprint(engine: Engine) -> str:
    """Equal for ranks that serve the same weights."""
    args = engine.config.args
    return f"dummy-{args.seed}" if args.load_format == "dummy" else fingerprint(engine.config.model_path)


def _watch_lifeline(stdin: BinaryIO) -> None:
    """End with the process that started this one, however it ended."""
    while stdin.read(1 << 10):
        pass
    os._exit(EXIT_ORPHANED)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # Ctrl-C and service managers signal the whole group. Whoever started the rank drains first and then cuts the lifeline.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankOptions)
    threading.Thread(target=_watch_lifeline, args=(sys.stdin.buffer,), name="lifeline", daemon=True).start()
    context = zmq.Context()
    try:
        engine = Engine(resolve(options.args))
    except ValueError as error:
        print(f"deepserve: the engine cannot start: {error}", file=sys.stderr, flush=True)
        return 1
    loop = EngineLoop(engine, options, context)
    try:
        loop.run()
    except Exception as error:
        logger.exception("the engine failed")
        loop.close(f"{type(error).__name__}: {error}")
        return 1
    loop.close()
    context.term()
    return 0


if __name__ == "__main__":
    # The lifeline thread sits in a read that nothing interrupts; leave without waiting for it.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
