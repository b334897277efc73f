"""A prefill and a decode engine in one process, and what a frontend does for them: passes messages on, reads along, gives up, retries."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from deepserve.engine.engine import Engine
from deepserve.engine.lockstep import Outcome, Wait, expert_step
from deepserve.engine.request import SamplingParams, SequenceOutput, validate
from deepserve.messages import Place, Submit
from deepserve.pd.messages import Attempt, GiveUp, Message, Prefill, Reservation, Reserve, decode, encode
from deepserve.pd.role import HandOffs
from tests.deepserve.engine.world import Story

WAIT_S = 60.0  # generous: machines that run tests are busy
PREFILL, DECODE = Place("prefill", 0), Place("decode", 0)


class Side:
    """One engine with its hand-offs, turned by hand as its loop would. The audit runs after each turn."""

    def __init__(self, place: Place, engine: Engine, post: Callable[[Place, Place | None, Message], None], clock: Callable[[], float]):
        self.place, self.engine = place, engine
        self.adopted: list[str] = []

        def send(line: Any, peer: Place | None, message: Message) -> None:
            post(place, peer, message)

        self.hand_offs = HandOffs(place.instance, place, engine, send, lambda request_id, line: self.adopted.append(request_id), clock)

    @property
    def busy(self) -> bool:
        return self.engine.has_work or self.hand_offs.has_work or self.hand_offs.wait is not Wait.MESSAGE

    def turn(self) -> list[SequenceOutput]:
        outputs = self.hand_offs.turn()
        plan = self.engine.plan()
        num_tokens = 0 if plan is None else plan.num_tokens
        step = expert_step([num_tokens], self.engine.config.args.max_dispatch_tokens_per_rank)
        self.hand_offs.exchange(Outcome((num_tokens,), step, False, False, wait=self.hand_offs.wait))
        found = self.engine.collect() if plan is None else self.engine.run(plan, step)
        outputs += self.hand_offs.take(found)
        self.hand_offs.check()
        return outputs

    def abort(self, request_id: str) -> None:
        self.hand_offs.abort([request_id])
        self.engine.abort([request_id])


class Pair:
    """`submit`, then `run`. `loses` says whether a message gets lost."""

    def __init__(self, prefill: Engine, decode: Engine, *, lease_s: float = WAIT_S, clock: Callable[[], float] = time.monotonic):
        self.lease_s = lease_s
        self.prefill, self.decode = (Side(place, engine, self.post, clock) for place, engine in ((PREFILL, prefill), (DECODE, decode)))
        self.sides = {PREFILL: self.prefill, DECODE: self.decode}
        self.writers = self.prefill.hand_offs.writers
        self.loses: Callable[[Message], bool] = lambda message: False
        self.seen: list[Message] = []
        self.stories: dict[tuple[str, int], Story] = defaultdict(Story)
        self.submits: dict[str, Submit] = {}
        self.given_up: dict[Attempt, str] = {}
        self._mail: deque[tuple[Place, Place | None, bytes]] = deque()

    def close(self) -> None:
        for side in self.sides.values():
            side.hand_offs.close()

    def post(self, sender: Place, to: Place | None, message: Message) -> None:
        """A message on its way to the frontend."""
        if not self.loses(message):
            self._mail.append((sender, to, encode(message)))

    def deliver(self) -> None:
        """All messages under way."""
        while self._mail:
            sender, to, frame = self._mail.popleft()
            message = decode(frame)
            self.seen.append(message)
            if isinstance(message, GiveUp):
                self.given_up.setdefault(message.attempt, message.error)
            if to is not None:
                self.sides[to].hand_offs.on_message("line", sender, message)
            elif isinstance(message, Reservation) and message.attempt not in self.given_up:
                self._tell(self.prefill, Prefill(self.submits[message.attempt.transfer], message))

    def _tell(self, side: Side, message: Message) -> None:
        if not self.loses(message):
            self.seen.append(message)
            side.hand_offs.on_message("line", None, message)

    def submit(self, request_id: str, prompt: list[int], epoch: int = 0, **params: Any) -> Attempt:
        """Ask the decode side for pages; the rest follows."""
        checked = validate(prompt, SamplingParams(**{"seed": 0, "max_tokens": 8, **params}), self.decode.engine.limits)
        submit = self.submits[request_id] = Submit(request_id, prompt, checked)
        attempt = Attempt(request_id, epoch)
        self._tell(self.decode, Reserve(attempt, submit, PREFILL, self.writers, self.lease_s))
        return attempt

    def give_up(self, attempt: Attempt) -> None:
        """The frontend is tired of waiting."""
        self.given_up.setdefault(attempt, "it took too long")
        for side in self.sides.values():
            self._tell(side, GiveUp(attempt, "it took too long"))

    def turn(self) -> None:
        self.deliver()
        for side in self.sides.values():
            for output in side.turn():
                self.stories[output.request_id, output.index].add(output)

    @property
    def busy(self) -> bool:
        return bool(self._mail) or any(side.busy for side in self.sides.values())

    def run(self) -> None:
        """Until nothing is left to do; then no page is held."""
        self.until(lambda: not self.busy)
        assert [side.engine.pages.num_held for side in self.sides.values()] == [0, 0]

    def until(self, condition: Callable[[], Any]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, "it does not come"
            self.turn()
