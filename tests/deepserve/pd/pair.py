"""A prefill and a decode engine in one process, with pages moving between them over NIXL, and what a router does for them."""

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from deepserve.engine.engine import Engine
from deepserve.engine.lockstep import Outcome, Wait, expert_step
from deepserve.engine.request import SamplingParams, SequenceOutput, validate
from deepserve.messages import Place, Submit
from deepserve.pd.messages import Attempt, GiveUp, HandOff, Message, Prefill, Reservation, Reserve, Settled, decode, encode
from deepserve.pd.role import HandOffs
from tests.deepserve.engine.driving import make_engine
from tests.deepserve.engine.world import Story

WAIT_S = 60.0  # generous: machines that run tests are busy
PREFILL, DECODE = Place("prefill0", 0), Place("decode0", 0)


class Side:
    """One engine with its hand-offs, turned by hand as its loop would."""

    def __init__(self, pair: "Pair", place: Place, engine: Engine):
        self.place, self.engine = place, engine
        self.adopted: list[str] = []
        role = place.instance.rstrip("0123456789")
        self.hand_offs = HandOffs(role, place, engine, lambda line, peer, message: pair.post(place, peer, message), self._adopt)

    def _adopt(self, request_id: str, line: Any) -> None:
        self.adopted.append(request_id)

    def turn(self) -> list[SequenceOutput]:
        outputs = self.hand_offs.turn()
        plan = self.engine.plan()
        num_tokens = 0 if plan is None else plan.num_tokens
        step = expert_step([num_tokens], self.engine.config.args.max_dispatch_tokens_per_rank)
        self.hand_offs.exchange(Outcome((num_tokens,), step, False, False, wait=self.hand_offs.wait))
        found = self.engine.collect() if plan is None else self.engine.run(plan, step)
        self.hand_offs.check()
        return outputs + self.hand_offs.take(found)


@dataclass
class Pair:
    """`submit`, then `run`. `lost` holds kinds of messages that do not arrive."""

    prefill: Side = field(init=False)
    decode: Side = field(init=False)
    lease_s: float = WAIT_S
    lost: set[type] = field(default_factory=set)
    seen: list[Message] = field(default_factory=list)
    stories: dict[tuple[str, int], Story] = field(default_factory=lambda: defaultdict(Story))
    submits: dict[str, Submit] = field(default_factory=dict)
    dead: set[Attempt] = field(default_factory=set)
    _mail: deque[tuple[Place, Place | None, bytes]] = field(default_factory=deque)

    @classmethod
    def of(cls, *, prefill: dict | None = None, decode: dict | None = None, **shared: Any) -> "Pair":
        """Engines with these arguments, those of one side beside the shared ones."""
        pair = cls()
        pair.prefill = Side(pair, PREFILL, make_engine(**shared, **(prefill or {})))
        pair.decode = Side(pair, DECODE, make_engine(**shared, **(decode or {})))
        return pair

    def close(self) -> None:
        for side in (self.prefill, self.decode):
            side.hand_offs.close()

    def post(self, sender: Place, to: Place | None, message: Message) -> None:
        """A message under way."""
        if type(message) in self.lost:
            return
        self.seen.append(message)
        if isinstance(message, GiveUp):
            self.dead.add(message.attempt)
        self._mail.append((sender, to, encode(message)))

    def deliver(self) -> None:
        """All messages under way; what the router says to those that it gets."""
        while self._mail:
            sender, to, frame = self._mail.popleft()
            message = decode(frame)
            if to is not None:
                self._side(to).hand_offs.on_message("line", sender, message)
            elif isinstance(message, Reservation) and message.attempt not in self.dead and Prefill not in self.lost:
                submit = self.submits[message.attempt.transfer]
                self.prefill.hand_offs.on_message("line", None, Prefill(submit, message))

    def _side(self, place: Place) -> Side:
        return self.prefill if place == PREFILL else self.decode

    def submit(self, request_id: str, prompt: list[int], epoch: int = 0, **params: Any) -> Attempt:
        """Ask the decode side for pages; `deliver` does the rest."""
        checked = validate(prompt, SamplingParams(**{"seed": 0, "max_tokens": 8, **params}), self.decode.engine.limits)
        submit = self.submits[request_id] = Submit(request_id, prompt, checked)
        attempt = Attempt(request_id, epoch)
        self.decode.hand_offs.on_message("line", None, Reserve(attempt, submit, PREFILL, self.lease_s))
        return attempt

    def turn(self) -> None:
        self.deliver()
        for side in (self.prefill, self.decode):
            for output in side.turn():
                self.stories[output.request_id, output.index].add(output)

    @property
    def busy(self) -> bool:
        sides = (self.prefill, self.decode)
        return bool(self._mail) or any(side.engine.has_work or side.hand_offs.has_work or side.hand_offs.wait is not Wait.MESSAGE for side in sides)

    def run(self) -> None:
        """Until nothing is left to do."""
        self.until(lambda: not self.busy)

    def until(self, condition: Any) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, "it does not come"
            self.turn()


__all__ = ["DECODE", "PREFILL", "HandOff", "Pair", "Settled"]
