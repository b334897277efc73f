"""The ranks of a local instance behind the interface of one `Engine`, for offline use: a frontend without HTTP.

`LLM` works with either; which one it has depends on the number of ranks.
"""

import itertools
import time

import msgspec
import zmq

from deepserve.config import EngineArgs
from deepserve.engine.request import Limits, SequenceOutput
from deepserve.messages import Abort, FromEngine, Goodbye, Heartbeat, Load, Outputs, Register, Submit, ToEngine
from deepserve.spawn import BLAME_S, LocalInstance

POLL_MS = 100  # between looks at the processes


class RankLost(RuntimeError):
    """A rank ended; the message names it."""


class RankPool:
    """Starts the ranks and spreads requests over the DP replicas by their number of unfinished sequences."""

    def __init__(self, args: EngineArgs):
        """Returns when every rank is loaded. Raises RankLost when one ends instead, its own words are on stderr; ValueError."""
        if args.on_rank_death != "fail":
            raise ValueError(f"on_rank_death {args.on_rank_death!r} is for servers: nobody here would send requests of a dead rank again")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.loads: dict[int, Load] = {}  # last report of each DP rank, at most a heartbeat old
        self._registers: dict[bytes, Register] = {}
        self._unfinished: dict[bytes, int] = {}  # sequences of each replica
        self._home: dict[str, tuple[bytes, set[int]]] = {}  # request -> replica, unfinished sequences
        self._turn = itertools.count()
        self._instance = LocalInstance(args)
        try:
            self._instance.start(f"tcp://127.0.0.1:{port}")
            while len(self._registers) < args.data_parallel_size:
                self._receive()
            # In rank order, whoever was ready first: the same requests go to the same replicas in every run.
            self._registers = dict(sorted(self._registers.items(), key=lambda item: item[1].dp_rank))
        except BaseException:
            self.shutdown()
            raise

    @property
    def limits(self) -> Limits:
        """What every replica can take."""
        registers = self._registers.values()
        return Limits(
            vocab_size=min(r.vocab_size for r in registers),
            max_model_len=min(r.max_model_len for r in registers),
            max_seq_tokens=min(r.num_pages * r.page_size for r in registers),
        )

    @property
    def has_work(self) -> bool:
        return bool(self._home)

    @property
    def pids(self) -> list[int]:
        """Process of each rank."""
        return self._instance.pids

    def submit(self, request: Submit) -> None:
        """Queue a validated request at the replica with the fewest unfinished sequences, in turn among equals."""
        replicas = list(self._registers)
        shift = next(self._turn) % len(replicas)
        replica = min(replicas[shift:] + replicas[:shift], key=lambda identity: self._unfinished[identity])
        self._home[request.request_id] = replica, set(range(request.params.n))
        self._unfinished[replica] += request.params.n
        self._send(replica, request)

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests; what still arrives for them is dropped."""
        for request_id in request_ids:
            replica, open_sequences = self._home.pop(request_id, (None, set()))
            if replica is not None:
                self._unfinished[replica] -= len(open_sequences)
                self._send(replica, Abort([request_id]))

    abandon = abort

    def step(self) -> list[SequenceOutput]:
        """News since the last call, waiting a little if there are none. Raises RankLost."""
        return self._receive()

    def shutdown(self) -> None:
        """End all ranks."""
        self._instance.stop(grace_s=10.0)
        self._socket.close()
        self._context.term()

    def _send(self, replica: bytes, message: ToEngine) -> None:
        self._socket.send_multipart((replica, self._encoder.encode(message)))

    def _receive(self) -> list[SequenceOutput]:
        if not self._socket.poll(POLL_MS):
            death = self._instance.poll()
            if death is not None:
                raise RankLost(f"{death}; see its messages above")
        outputs: list[SequenceOutput] = []
        while True:
            try:
                identity, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return outputs
            match self._decoder.decode(payload):
                case Register() as register:
                    self._registers[identity] = register
                    self._unfinished[identity] = 0
                case Heartbeat(dp_rank=dp_rank, load=load):
                    self.loads[dp_rank] = load
                case Outputs(found, load):
                    self.loads[self._registers[identity].dp_rank] = load
                    outputs += [output for output in found if self._note(output)]
                case Goodbye(error) if error:
                    raise RankLost(f"{self._first_death()}: {error}")

    def _first_death(self) -> str:
        """Whose end it was, after a rank has said that it ends; it may take a while to be gone, and the one to blame longer."""
        deadline = time.monotonic() + 2 * BLAME_S
        while (death := self._instance.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return str(death or "a rank ended")

    def _note(self, output: SequenceOutput) -> bool:
        """Whether anybody still waits for this output."""
        if output.request_id not in self._home:
            return False
        replica, open_sequences = self._home[output.request_id]
        if output.finish_reason is not None and output.index in open_sequences:
            open_sequences.remove(output.index)
            self._unfinished[replica] -= 1
            if not open_sequences:
                del self._home[output.request_id]
        return True
