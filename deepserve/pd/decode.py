"""Leader of a decode rank's hand-offs: sets pages aside, counts what arrives in them, and takes sequences over from prefill ranks.

asked ---room---> live ---hand-off and all parts---> a running sequence
  |                 '---given up, expired, aborted---> quarantined ---settled or shut out---> gone
  '---given up, aborted---> gone
"""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deepserve.engine.request import SequenceOutput
from deepserve.engine.scheduler import Scheduler
from deepserve.messages import Place
from deepserve.pd.fence import Fence, Renew, Renewed, Retire, Retired, may_write
from deepserve.pd.messages import Attempt, GiveUp, HandOff, Message, Progress, Reservation, Reserve, Settled
from hw.transfer import Part, Receipt

Send = Callable[[Any, Place | None, Message], None]  # on which line, to whom, what
ASK_S = 1.0  # between questions whether a quarantine may end


@dataclass
class _Incoming:
    """One attempt, from its `Reservation` on."""

    reserve: Reserve
    line: Any
    generation: int  # of the transfer that it comes through
    hits: list[int]  # pages of the prompt's beginning that the prefix cache had
    hashes: list[bytes]
    parts: list[list[Part]] = field(default_factory=list)  # by TP rank
    hand_off: HandOff | None = None
    quarantined: bool = False
    asked_s: float = 0.0

    @property
    def owner(self) -> str:
        """Of its pages."""
        return owner_of(self.reserve.attempt)

    def complete(self) -> bool:
        """Whether every TP rank has all of it."""
        if self.hand_off is None:
            return False
        attempt = self.reserve.attempt
        for parts in self.parts:
            receipt = Receipt(attempt.transfer, attempt.epoch, self.hand_off.num_writers)
            for part in parts:
                receipt.add(part)
            if not receipt.complete:
                return False
        return True


def owner_of(attempt: Attempt) -> str:
    return f"{attempt.transfer}/{attempt.epoch}"


class DecodeRole:
    """Not thread-safe; times are of `time.monotonic`."""

    def __init__(
        self,
        scheduler: Scheduler,
        place: Place,
        descriptions: list[bytes],
        command: Callable[[Renew | Retire], None],
        send: Send,
        adopt: Callable[[str, Any], None],
    ):
        """descriptions: of the pages of each rank of the TP group, which `command` reaches.

        adopt: told the request and the line of each sequence taken over.
        """
        self._scheduler, self._pages = scheduler, scheduler.pages
        self._place, self._send, self._adopt = place, send, adopt
        self._fence = Fence(descriptions, command)
        self._asked: deque[tuple[Reserve, Any]] = deque()
        self._incoming: dict[Attempt, _Incoming] = {}
        self._untold: list[tuple[Any, Reservation]] = []  # of pages that a step in flight may write to

    @property
    def num_asked(self) -> int:
        """Hand-offs that wait for room."""
        return len(self._asked)

    @property
    def is_offering(self) -> bool:
        """Whether `turn` may offer pages to writers."""
        return bool(self._asked or self._untold)

    @property
    def is_live(self) -> bool:
        """Whether a hand-off may still succeed, and has its pages."""
        return any(not incoming.quarantined for incoming in self._incoming.values())

    @property
    def is_unsettled(self) -> bool:
        """Whether pages wait for their writer to let go of them."""
        return any(incoming.quarantined for incoming in self._incoming.values())

    @property
    def held(self) -> list[list[int]]:
        """Pages held, beside those that sequences hold and that are in transfer."""
        return [incoming.hits for incoming in self._incoming.values()]

    def on_message(self, line: Any, message: Message, now_s: float) -> None:
        match message:
            case Reserve(attempt, submit):
                self.abort([submit.request_id], now_s)  # an earlier attempt
                if self._pages.num_for(len(submit.prompt_token_ids) + 1) > self._pages.num_pages:
                    error = f"a prompt of {len(submit.prompt_token_ids)} tokens does not fit {self._pages.num_pages} pages at decode"
                    self._send(line, None, GiveUp(attempt, error))
                elif attempt not in self._incoming:
                    self._asked.append((message, line))
            case Progress(attempt) | HandOff(attempt):
                incoming = self._incoming.get(attempt)
                if incoming is not None and not incoming.quarantined:
                    self._renew(incoming, now_s)
                    if isinstance(message, HandOff):
                        incoming.hand_off = message
            case GiveUp(attempt):
                self._asked = deque(asked for asked in self._asked if asked[0].attempt != attempt)
                if attempt in self._incoming and not self._incoming[attempt].complete():
                    self._cancel(self._incoming[attempt], message.error, now_s)
            case Settled(attempt, writers):
                incoming = self._incoming.get(attempt)
                if incoming is not None and incoming.reserve.writers == writers:
                    self._settle(incoming)

    def on_part(self, rank: int, part: Part, now_s: float) -> None:
        """TP rank `rank` has a part in place."""
        incoming = self._incoming.get(Attempt(part.transfer, part.epoch))
        if incoming is not None and not incoming.quarantined:
            incoming.parts[rank].append(part)
            self._renew(incoming, now_s)

    def on_answer(self, rank: int, answer: Renewed | Retired) -> None:
        """TP rank `rank` has done what the fence told it."""
        self._fence.on_answer(rank, answer)
        if not self._fence.is_busy:
            for incoming in list(self._incoming.values()):
                if self._is_shut_out(incoming):
                    self._settle(incoming)

    def turn(self, now_s: float) -> list[SequenceOutput]:
        """Take over what is complete, give up what came to a standstill, reserve for who waits. News for clients."""
        outputs: list[SequenceOutput] = []
        for incoming in list(self._incoming.values()):
            if incoming.quarantined and now_s - incoming.asked_s >= ASK_S:
                self._shut_out(incoming, now_s)
            elif not incoming.quarantined and incoming.complete():
                outputs += self._take_over(incoming)
        for owner in self._pages.expired(now_s):
            late = next(incoming for incoming in self._incoming.values() if incoming.owner == owner)
            self._cancel(late, f"nothing came from {late.reserve.prefill.instance} for {late.reserve.lease_s:g} s", now_s)
        self._finish_generation(now_s)
        while self._asked and self._fence.is_open and self._reserve(*self._asked[0], now_s):
            self._asked.popleft()
        self._tell()
        return outputs

    def abort(self, request_ids: list[str], now_s: float) -> None:
        """End the attempts at these requests."""
        self._asked = deque(asked for asked in self._asked if asked[0].submit.request_id not in request_ids)
        for incoming in list(self._incoming.values()):
            if incoming.reserve.submit.request_id in request_ids:
                self._cancel(incoming, "the request was aborted", now_s)

    def forget(self, line: Any, now_s: float) -> None:
        """The frontend of this line is gone, and its requests with it."""
        self._asked = deque(asked for asked in self._asked if asked[1] is not line)
        for incoming in list(self._incoming.values()):
            if incoming.line is line:
                self._cancel(incoming, "the frontend is gone", now_s)

    def _reserve(self, reserve: Reserve, line: Any, now_s: float) -> bool:
        """False while there is no room: pages for the prompt and a token, as for a sequence that starts here, and places in the batch."""
        submit, pages = reserve.submit, self._pages
        prompt = submit.prompt_token_ids
        if self._scheduler.num_free_rows <= sum(not incoming.quarantined for incoming in self._incoming.values()):
            return False
        hits, hashes = pages.match(array("i", prompt), submit.cache_salt)
        if pages.num_for(len(prompt) + 1) - len(hits) > pages.num_available - pages.num_cached_of(hits):
            return False
        pages.hold(hits)
        descriptions = self._fence.descriptions
        incoming = _Incoming(reserve, line, self._fence.generation, hits, hashes, [[] for _ in descriptions])
        mine = pages.reserve(incoming.owner, pages.num_for(len(prompt)) - len(hits), now_s + reserve.lease_s)
        pages.begin_transfer(incoming.owner)  # from the moment that they are told
        self._incoming[reserve.attempt] = incoming
        reservation = Reservation(
            attempt=reserve.attempt,
            decode=self._place,
            weight_version=pages.weight_version,
            page_size=pages.page_size,
            num_cached_tokens=len(hits) * pages.page_size,
            pages=mine,
            descriptions=descriptions,
            lease_s=reserve.lease_s,
        )
        self._untold.append((line, reservation))
        return True

    def _tell(self) -> None:
        """A writer elsewhere comes behind no step of this device, so it is told of pages once none in flight writes to them."""
        untold, self._untold = self._untold, []
        for line, reservation in untold:
            incoming = self._incoming.get(reservation.attempt)
            if incoming is None or incoming.quarantined:
                continue
            if self._pages.may_be_written(reservation.pages):
                self._untold.append((line, reservation))
            else:
                self._send(line, None, reservation)

    def _take_over(self, incoming: _Incoming) -> list[SequenceOutput]:
        submit = incoming.reserve.submit
        pages = incoming.hits + self._pages.finish_transfer(incoming.owner)
        del self._incoming[incoming.reserve.attempt]
        self._adopt(submit.request_id, incoming.line)
        return self._scheduler.take_over(submit, pages, incoming.hashes, incoming.hand_off.first)

    def _renew(self, incoming: _Incoming, now_s: float) -> None:
        self._pages.renew(incoming.owner, now_s + incoming.reserve.lease_s)

    def _cancel(self, incoming: _Incoming, error: str, now_s: float) -> None:
        if not incoming.quarantined:
            self._quarantine(incoming)
            self._ask(incoming, error, now_s)

    def _quarantine(self, incoming: _Incoming) -> None:
        incoming.quarantined = True
        self._pages.cancel(incoming.owner)
        self._pages.release(incoming.hits)
        incoming.hits = []

    def _settle(self, incoming: _Incoming) -> None:
        """Nothing can arrive for it any more."""
        if not incoming.quarantined:
            self._quarantine(incoming)
        del self._incoming[incoming.reserve.attempt]
        self._pages.acknowledge(incoming.owner)

    def _shut_out(self, incoming: _Incoming, now_s: float) -> None:
        """No answer came in `ASK_S`. Writers that may be on this machine have to answer, or to end; all others need not."""
        if self._is_shut_out(incoming):
            self._settle(incoming)
            return
        self._ask(incoming, "the pages are wanted back", now_s)
        if not any(map(may_write, incoming.reserve.writers)):
            self._fence.shut_out(now_s)

    def _is_shut_out(self, incoming: _Incoming) -> bool:
        return incoming.generation < self._fence.num_retired and not any(map(may_write, incoming.reserve.writers))

    def _finish_generation(self, now_s: float) -> None:
        """Have the earlier transfer closed once nothing that may succeed needs it."""
        if not self._fence.is_busy:
            return
        earlier = [incoming for incoming in self._incoming.values() if incoming.generation < self._fence.generation]
        if self._fence.is_late(now_s):
            for incoming in earlier:
                self._cancel(incoming, "the pages had to be made safe from another writer", now_s)
        if all(incoming.quarantined for incoming in earlier):
            self._fence.finished()

    def _ask(self, incoming: _Incoming, error: str, now_s: float) -> None:
        """Have the prefill rank stop, and say when it has."""
        incoming.asked_s = now_s
        self._send(incoming.line, incoming.reserve.prefill, GiveUp(incoming.reserve.attempt, error))
