"""Which engine rank runs which request, and what becomes of it when that rank fails. No sockets: `Dispatcher` is told what came and sends.

A request runs whole on one rank, or its prompt runs on a prefill rank and the rest on a decode rank, which answers it from the first token:

    Reserve ----> decode       Reservation ----> Prefill to the prefill rank       HandOff passes by       Outputs from decode

Ranks talk to each other through here (`deepserve.pd.messages`). The decode rank keeps the time: it waits for room as long as it lives, and
gives up a hand-off whose lease has run out, or whose prefill rank is gone. So a hand-off ends with outputs, with a `GiveUp`, or with its
decode rank. Two instances between which one was given up have no more than one under way until one succeeds: the link may be cut.

A request of which nothing has come back is run elsewhere, once; the others end with an error.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from deepserve.messages import Abort, Place, Relay, ToEngine
from deepserve.pd import messages as pd
from deepserve.server.registry import Engine
from deepserve.server.router import Router
from deepserve.server.stream import EngineRequest

log = logging.getLogger("deepserve.server")

PREFILL, DECODING = ("prefill",), ("unified", "decode")


class HandOffOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How prompts go from prefill to decode instances."""

    lease_s: float = 15.0  # a hand-off without progress for so long is given up
    max_local_prefill_tokens: int = 64  # a decode rank computes a prompt itself that has no more tokens than this beyond its prefix cache

    def __post_init__(self):
        """Raises ValueError with the offending value."""
        if not 1.0 <= self.lease_s < float("inf"):
            raise ValueError(f"hand_off: lease_s must be at least 1, got {self.lease_s}")
        if self.max_local_prefill_tokens < 0:
            raise ValueError(f"hand_off: max_local_prefill_tokens must be at least 0, got {self.max_local_prefill_tokens}")


class OpenHandOff:
    """Of a request of which nothing has come back yet."""

    __slots__ = ("attempt", "handed", "num_fresh", "prefill", "start_s")

    def __init__(self, attempt: pd.Attempt, prefill: Engine, num_fresh: int):
        self.attempt, self.prefill = attempt, prefill
        self.num_fresh = num_fresh  # tokens that the prefill rank has to compute, as far as is known here
        self.start_s = time.perf_counter()
        self.handed = False  # the prompt is computed and the decode rank was told; before, it cannot have begun


class Dispatcher:
    """`send` gives a message to an engine; False: nobody is there any more, and `lost` has been called. `serving`: who may get requests."""

    def __init__(self, send: Callable[[Engine, ToEngine], bool], serving: Callable[[], Iterable[Engine]], options: HandOffOptions):
        self.draining = False  # nothing is run elsewhere
        self._send, self._serving, self._options = send, serving, options
        self._router = Router()
        self._epoch = 0
        self._doubtful: set[tuple[str, str]] = set()  # prefill and decode instances whose latest hand-off was given up

    def place(self, request: EngineRequest, *, avoid: str = "") -> bool:
        """Send it where it suits best; False: nobody can take it. avoid: an instance that it must not go to."""
        while True:
            engine = self._router.pick(self._answerers(request, avoid), request.prompt)
            if engine is None:
                return False
            prefill = self._prefill_for(request, engine, avoid)
            hand_off = None if prefill is None else self._open(request, prefill)
            # An engine that proves to be gone is removed; the next one is asked.
            if self._send(engine, request.message if hand_off is None else self._reserve(request, hand_off)):
                break
        request.engine, request.stats, request.hand_off = engine, engine.stats, hand_off
        engine.requests[request.request_id] = request
        self._router.remember(engine, request.prompt)
        if prefill is not None:
            prefill.prefills[request.request_id] = request
            self._router.remember(prefill, request.prompt)
        return True

    def relay(self, sender: Engine, message: Relay, peer: Engine | None) -> None:
        """Pass on what is for another rank, and read along. peer: the rank at `message.peer`, None if there is none."""
        try:
            news = pd.decode(message.frame)
        except ValueError as error:
            log.error("a message of %s is ignored: %s", sender.name, error)
            return
        if peer is not None:
            self._send(peer, Relay(Place(*sender.place), message.frame))
        request = sender.requests.get(news.attempt.transfer) or sender.prefills.get(news.attempt.transfer)
        if request is None or request.hand_off is None or request.hand_off.attempt != news.attempt:
            return  # of an attempt that is over
        match news:
            case pd.Reservation():
                self._send(request.hand_off.prefill, _from_router(pd.Prefill(request.message, news)))
            case pd.HandOff():
                request.hand_off.handed = True
            case pd.GiveUp():
                self._doubtful.add(_pair(request))
                self._end(request, news.error, request.hand_off.prefill.instance)

    def begun(self, request: EngineRequest) -> bool:
        """An output of it has come. False if that is void: of an attempt that was given up, whose abort has not got there yet."""
        if request.hand_off is not None:
            if not request.hand_off.handed:
                return False
            self._doubtful.discard(_pair(request))
            request.stats.num_hand_offs["taken"] += 1
            request.stats.hand_off_s.observe(time.perf_counter() - request.hand_off.start_s)
            self._close(request)
        return True

    def abort(self, requests: list[EngineRequest]) -> None:
        """Nobody reads them any more. A decode rank sees to it that the prefill rank hears of it."""
        by_engine: dict[Engine, list[str]] = {}
        for request in requests:
            self._close(request)
            by_engine.setdefault(request.engine, []).append(request.request_id)
        for engine, request_ids in by_engine.items():
            self._send(engine, Abort(request_ids))

    def lost(self, engine: Engine, reason: str) -> None:
        """Run elsewhere what has not begun, end the rest with an error. What it has handed over goes on if all of it has arrived."""
        for request in [request for request in engine.prefills.values() if request.hand_off.handed]:
            self._send(request.engine, _from_router(pd.GiveUp(request.hand_off.attempt, reason)))
        found = self._requests_at(engine)
        num_moved = sum(self._end(request, reason, engine.lost_with_it) for request in found if engine.has(request))
        num_failed = len(found) - num_moved
        (log.error if num_failed else log.info)("%s; %d of its requests fail, %d are sent elsewhere", reason, num_failed, num_moved)

    def move(self, engine: Engine, reason: str) -> None:
        """Run elsewhere what has not begun there, if there is where; the rest stays."""
        for request in self._requests_at(engine):
            if engine.has(request) and self._may_run_again(request, engine.instance):
                self._end(request, reason, engine.instance)

    def _candidates(self, roles: tuple[str, ...], avoid: str) -> Iterator[Engine]:
        return (engine for engine in self._serving() if engine.register.role in roles and engine.instance != avoid)

    def _answerers(self, request: EngineRequest, avoid: str) -> list[Engine]:
        """Who may run it to its end: decode ranks, but where nothing follows the first token there is nothing to hand off."""
        alone = list(self._candidates(PREFILL, avoid)) if request.message.params.max_tokens <= 1 else []
        return alone or list(self._candidates(DECODING, avoid))

    def _prefill_for(self, request: EngineRequest, engine: Engine, avoid: str) -> Engine | None:
        """Who computes its prompt for `engine`; None: `engine` itself, also where no prefill rank is left."""
        if engine.register.role != "decode":
            return None
        if self._router.num_fresh(engine, request.prompt) <= self._options.max_local_prefill_tokens:
            return None
        candidates = (prefill for prefill in self._candidates(PREFILL, avoid) if not self._is_tried(prefill, engine))
        return self._router.pick(candidates, request.prompt, level=False)

    def _is_tried(self, prefill: Engine, decode: Engine) -> bool:
        """Whether a hand-off is under way that will show if the two reach each other."""
        pair = prefill.instance, decode.instance
        return pair in self._doubtful and any(_pair(request) == pair for request in prefill.prefills.values())

    def _open(self, request: EngineRequest, prefill: Engine) -> OpenHandOff:
        self._epoch += 1
        return OpenHandOff(pd.Attempt(request.request_id, self._epoch), prefill, self._router.num_fresh(prefill, request.prompt))

    def _reserve(self, request: EngineRequest, hand_off: OpenHandOff) -> Relay:
        where, writers = Place(*hand_off.prefill.place), hand_off.prefill.register.writers
        return _from_router(pd.Reserve(hand_off.attempt, request.message, where, writers, self._options.lease_s))

    def _requests_at(self, engine: Engine) -> list[EngineRequest]:
        """That fail with it."""
        return [*engine.requests.values(), *(request for request in engine.prefills.values() if not request.hand_off.handed)]

    def _may_run_again(self, request: EngineRequest, avoid: str) -> bool:
        return not (self.draining or request.prefilled or request.retried) and bool(self._answerers(request, avoid))

    def _end(self, request: EngineRequest, reason: str, avoid: str) -> bool:
        """It cannot go on where it is. Returns whether it is run elsewhere; else it ends with an error."""
        runs_again, stats = self._may_run_again(request, avoid), request.stats
        self._withdraw(request, reason)
        request.retried = True
        if runs_again and self.place(request, avoid=avoid):
            stats.num_retried += 1
            waited_s = time.perf_counter() - request.start_s
            log.info("request %s is sent elsewhere %.3f s after it came: %s", request.request_id, waited_s, reason)
            return True
        request.fail(reason, time.perf_counter())
        return False

    def _withdraw(self, request: EngineRequest, reason: str) -> None:
        """Take it from the ranks that have it, and tell those that are there."""
        engine, hand_off = request.engine, request.hand_off
        del engine.requests[request.request_id]
        self._close(request)
        self._send(engine, Abort([request.request_id]))
        if hand_off is not None:
            request.stats.num_hand_offs["given_up"] += 1
            self._send(hand_off.prefill, _from_router(pd.GiveUp(hand_off.attempt, reason)))

    def _close(self, request: EngineRequest) -> None:
        """Its hand-off, if it had one, is over."""
        if request.hand_off is not None:
            request.hand_off.prefill.prefills.pop(request.request_id, None)
            request.hand_off = None


def _pair(request: EngineRequest) -> tuple[str, str]:
    """Instances of its hand-off."""
    return request.hand_off.prefill.instance, request.engine.instance


def _from_router(message: pd.Message) -> Relay:
    return Relay(None, pd.encode(message))
