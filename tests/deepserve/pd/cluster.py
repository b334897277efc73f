"""Prefill and decode instances as processes, and as much of a router as it takes to use them."""

import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from deepserve.engine.request import Limits, SamplingParams, validate
from deepserve.messages import FromEngine, Goodbye, Heartbeat, Load, Outputs, Place, Register, Relay, Submit, ToEngine
from deepserve.pd.messages import Attempt, GiveUp, Message, Prefill, Reservation, Reserve, decode, encode
from deepserve.spawn import start_rank
from tests.deepserve.engine.world import Story

WAIT_S = 60.0  # generous: machines that run tests are busy


class Cluster:
    """A context manager; leaving it kills what still lives."""

    def __init__(self, lease_s: float = WAIT_S, **args: Any):
        """args: of every engine."""
        self.lease_s = lease_s
        self.registers: dict[Place, Register] = {}
        self.loads: dict[Place, Load] = defaultdict(Load)  # the latest
        self.stories: dict[tuple[str, int], Story] = defaultdict(Story)
        self.relayed: list[tuple[Place, Place | None, Message]] = []
        self.given_up: set[Attempt] = set()
        self.processes: dict[str, list[subprocess.Popen]] = {}
        self._args = args
        self._submits: dict[Attempt, Submit] = {}
        self._prefills: dict[Attempt, Place] = {}
        self._identities: dict[Place, bytes] = {}
        self._places: dict[bytes, Place] = {}
        self._folders: list[str] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromEngine)

    def start(self, role: str, instance: str, dp: int = 1, tp: int = 1, **args: Any) -> None:
        """Start an instance; `wait_for` says when it is there."""
        folder = tempfile.mkdtemp(prefix="deepserve-test-")
        self._folders.append(folder)
        options = {
            "args": {
                "dtype": "float32", "num_threads": 1, "data_parallel_size": dp, "tensor_parallel_size": tp, **self._args, **args,
            },
            "frontends": [f"tcp://127.0.0.1:{self._port}"],
            "instance": instance,
            "role": role,
            "rendezvous": f"file:{folder}/rendezvous",
        }  # fmt: skip
        self.processes[instance] = [start_rank({**options, "rank": rank}) for rank in range(dp * tp)]

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *error: object) -> None:
        for instance in list(self.processes):
            self.kill(instance)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._socket.close()
        self._context.term()

    def kill(self, instance: str) -> None:
        for process in self.processes.pop(instance):
            process.kill()
            process.wait()
            process.stdin.close()
        for place in [place for place in self.registers if place.instance == instance]:
            self._leave(place)

    def _leave(self, place: Place) -> None:
        del self.registers[place]
        self._places.pop(self._identities.pop(place))

    # Requests

    def submit(self, request_id: str, prompt: list[int], prefill: Place, decode: Place, epoch: int = 0, **params: Any) -> Attempt:
        """Have a request's prompt computed on one rank and its tokens on another."""
        register = min(self.registers.values(), key=lambda register: register.num_pages)
        limits = Limits(register.vocab_size, register.max_model_len, register.num_pages * register.page_size)
        checked = validate(prompt, SamplingParams(**{"seed": 0, "max_tokens": 8, **params}), limits)
        attempt = Attempt(request_id, epoch)
        self._submits[attempt] = Submit(request_id, prompt, checked)
        self._prefills[attempt] = prefill
        self.send(
            decode, Relay(None, encode(Reserve(attempt, self._submits[attempt], prefill, self.registers[prefill].writers, self.lease_s)))
        )
        return attempt

    def send(self, place: Place, message: ToEngine) -> None:
        if place in self._identities:  # else it is lost, as with a real router
            self._socket.send_multipart((self._identities[place], self._encoder.encode(message)))

    # What comes

    def until(self, condition: Callable[[], Any], wait_s: float = WAIT_S) -> None:
        """Route messages until it holds."""
        deadline_s = time.monotonic() + wait_s
        while not condition():
            assert time.monotonic() < deadline_s, f"it does not come: {self.loads}"
            for instance, processes in self.processes.items():
                assert all(process.poll() is None for process in processes), f"a rank of {instance} ended"
            if self._socket.poll(100):
                self._route(*self._socket.recv_multipart())

    def wait_for(self, *places: Place) -> None:
        self.until(lambda: all(place in self.registers for place in places))

    def finish(self, *request_ids: str) -> None:
        """Until these requests, of one sequence each, have ended."""
        self.until(lambda: all(self.stories[request_id, 0].finish_reason for request_id in request_ids))

    def heard(self, kind: type[Message], attempt: Attempt) -> list[Message]:
        """Messages of a kind that were passed on."""
        return [message for _, _, message in self.relayed if isinstance(message, kind) and message.attempt == attempt]

    def settle(self, *places: Place) -> None:
        """Until all pages there are free or cached."""
        for place in places:
            self.loads[place] = Load(num_held_pages=1)  # an old report says nothing
        self.until(lambda: not any(self.loads[place].num_held_pages for place in places))

    def _route(self, identity: bytes, payload: bytes) -> None:
        message = self._decoder.decode(payload)
        match message:
            case Register():
                place = Place(message.instance, message.dp_rank)
                self.registers[place], self._identities[place], self._places[identity] = message, identity, place
            case Heartbeat(instance, dp_rank, load):
                self.loads[Place(instance, dp_rank)] = load
            case Outputs(outputs, load):
                self.loads[self._places[identity]] = load
                for output in outputs:
                    self.stories[output.request_id, output.index].add(output)
            case Goodbye() if identity in self._places:
                self._leave(self._places[identity])
            case Relay(peer, frame) if identity in self._places:
                self._relay(self._places[identity], peer, frame)

    def _relay(self, sender: Place, peer: Place | None, frame: bytes) -> None:
        message = decode(frame)
        self.relayed.append((sender, peer, message))
        if isinstance(message, GiveUp):
            self.given_up.add(message.attempt)
        if peer is not None:
            self.send(peer, Relay(sender, frame))
        elif isinstance(message, Reservation) and message.attempt not in self.given_up:
            prefill = Prefill(self._submits[message.attempt], message)
            self.send(self._prefills[message.attempt], Relay(None, encode(prefill)))
