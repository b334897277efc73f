"""Leader of a prefill rank's hand-offs: has prompts computed and their pages written, and says when the sequence may go on."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deepserve.engine.request import Sequence, SequenceOutput
from deepserve.engine.scheduler import Scheduler
from deepserve.messages import Place, Process
from deepserve.pd.messages import Attempt, GiveUp, HandOff, Message, Prefill, Progress, Reservation, Settled
from deepserve.pd.writer import Chunk, Halt, Report

Send = Callable[[Any, Place | None, Message], None]  # on which line, to whom, what
PROGRESS_PER_LEASE = 3


@dataclass
class _Outgoing:
    """One attempt, from its `Prefill` until nothing of it is under way."""

    attempt: Attempt
    request_id: str
    reservation: Reservation
    line: Any
    sequence: Sequence | None  # None: handed off or given up
    num_settled: list[int]  # chunks, by TP rank
    num_sent_pages: int  # of the prompt
    progress_s: float
    first: SequenceOutput | None = None  # what the draw behind the prompt gave
    chunks: deque[list[int]] = field(default_factory=deque)  # pages that stay as they are
    num_chunks: int = 0
    num_released: int = 0
    given_up: bool = False

    @property
    def num_all_settled(self) -> int:
        """Chunks of which nothing is under way from any rank."""
        return min(self.num_settled)


class PrefillRole:
    """Not thread-safe; times are of `time.monotonic`."""

    def __init__(self, scheduler: Scheduler, writers: list[Process], command: Callable[[Chunk | Halt], None], send: Send):
        """writers: the ranks of the TP group; `command` reaches all of them."""
        self._scheduler, self._pages = scheduler, scheduler.pages
        self._writers, self._command, self._send = writers, command, send
        self._attempts: dict[Attempt, _Outgoing] = {}

    @property
    def is_live(self) -> bool:
        """Whether a hand-off may still succeed."""
        return any(not outgoing.given_up for outgoing in self._attempts.values())

    @property
    def is_unsettled(self) -> bool:
        """Whether anything of hand-offs that were given up is under way."""
        return any(outgoing.given_up for outgoing in self._attempts.values())

    @property
    def held(self) -> list[list[int]]:
        """Pages that writes hold, beside those that sequences hold."""
        return [pages for outgoing in self._attempts.values() for pages in outgoing.chunks]

    def on_message(self, line: Any, peer: Place | None, message: Message, now_s: float) -> None:
        match message:
            case Prefill():
                self._begin(line, message, now_s)
            case GiveUp(attempt) if attempt in self._attempts:
                self._attempts[attempt].line = line
                self._give_up(self._attempts[attempt])
            case GiveUp(attempt) if peer is not None:
                self._send(line, peer, Settled(attempt, self._writers))

    def _begin(self, line: Any, message: Prefill, now_s: float) -> None:
        submit, reservation, pages = message.submit, message.reservation, self._pages
        attempt, request_id = reservation.attempt, submit.request_id
        if attempt in self._attempts:
            return
        self.abort([request_id])  # an earlier attempt
        error = ""
        if reservation.weight_version != pages.weight_version:
            error = f"weights are of version {pages.weight_version} at prefill, {reservation.weight_version} at decode"
        elif reservation.page_size != pages.page_size:
            error = f"pages have {pages.page_size} tokens at prefill, {reservation.page_size} at decode"
        elif not submit.params.max_tokens:
            error = f"max_tokens {submit.params.max_tokens} leaves nothing to hand off"
        elif pages.num_for(len(submit.prompt_token_ids) + 1) > pages.num_pages:
            error = f"a prompt of {len(submit.prompt_token_ids)} tokens does not fit {pages.num_pages} pages at prefill"
        elif self._scheduler.knows(request_id):
            error = f"request {request_id} is running at prefill"
        if error:
            self._send(line, reservation.decode, GiveUp(attempt, error))
            return
        sequence = self._scheduler.add(request_id, submit.prompt_token_ids, submit.params, submit.cache_salt, hands_off=True)
        num_there = reservation.num_cached_tokens // pages.page_size
        settled = [0] * len(self._writers)
        self._attempts[attempt] = _Outgoing(attempt, request_id, reservation, line, sequence, settled, num_there, now_s)

    def take(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Keep first tokens that go to decode ranks; the other outputs."""
        computing = {outgoing.request_id: outgoing for outgoing in self._attempts.values() if outgoing.sequence is not None}
        others = []
        for output in outputs:
            if output.request_id in computing:
                computing[output.request_id].first = output
            else:
                others.append(output)
        return others

    def turn(self, now_s: float) -> None:
        """Between two steps, none of which is told later: have written what is computed, hand off what is complete, show life."""
        for outgoing in list(self._attempts.values()):
            if outgoing.sequence is not None:
                self._advance(outgoing)
            if now_s - outgoing.progress_s > outgoing.reservation.lease_s / PROGRESS_PER_LEASE and not outgoing.given_up:
                outgoing.progress_s = now_s
                self._tell(outgoing, Progress(outgoing.attempt, outgoing.num_sent_pages * self._pages.page_size))

    def _advance(self, outgoing: _Outgoing) -> None:
        sequence, reservation, pages = outgoing.sequence, outgoing.reservation, self._pages
        is_last = outgoing.first is not None
        end = pages.num_for(sequence.num_prompt) if is_last else sequence.num_computed // pages.page_size
        start = outgoing.num_sent_pages
        if end > start or is_last:
            num_there = reservation.num_cached_tokens // pages.page_size
            mine, theirs = sequence.pages[start:end], reservation.pages[start - num_there : end - num_there]
            pages.hold(mine)
            outgoing.chunks.append(mine)
            outgoing.num_chunks += 1
            outgoing.num_sent_pages = end
            descriptions, timeout_s = reservation.descriptions, reservation.lease_s
            self._command(Chunk(outgoing.attempt, reservation.decode, descriptions, mine, theirs, is_last, timeout_s))
        if is_last:
            self._tell(outgoing, HandOff(outgoing.attempt, outgoing.first, len(self._writers)))
            self._leave(outgoing)

    def on_report(self, rank: int, report: Report) -> None:
        """How the writes of TP rank `rank` stand."""
        outgoing = self._attempts.get(report.attempt)
        if outgoing is None:
            return
        outgoing.num_settled[rank] = report.num_settled
        while outgoing.chunks and outgoing.num_released < outgoing.num_all_settled:
            self._release_chunk(outgoing)
        if report.error and not outgoing.given_up:
            self._tell(outgoing, GiveUp(report.attempt, f"the hand-off failed: {report.error}"))
            self._give_up(outgoing)
        else:
            self._sweep(outgoing)

    def abort(self, request_ids: list[str]) -> None:
        """End the attempts at these requests."""
        for outgoing in [outgoing for outgoing in self._attempts.values() if outgoing.request_id in request_ids]:
            self._give_up(outgoing)

    def forget(self, line: Any) -> None:
        """The frontend of this line is gone, and its requests with it."""
        self.abort([outgoing.request_id for outgoing in self._attempts.values() if outgoing.line is line])

    def _give_up(self, outgoing: _Outgoing) -> None:
        if not outgoing.given_up:
            outgoing.given_up = True
            self._leave(outgoing)
            self._command(Halt(outgoing.attempt))
            while outgoing.chunks:  # whoever gets these pages now may change what is still being sent: nobody will read it
                self._release_chunk(outgoing)
        self._sweep(outgoing)

    def _leave(self, outgoing: _Outgoing) -> None:
        """Out of the batch; the writes hold what they need."""
        if outgoing.sequence is not None:
            outgoing.sequence = None
            self._scheduler.abort(outgoing.request_id)

    def _release_chunk(self, outgoing: _Outgoing) -> None:
        self._pages.release(outgoing.chunks.popleft())
        outgoing.num_released += 1

    def _sweep(self, outgoing: _Outgoing) -> None:
        """Forget an attempt of which nothing is under way."""
        if outgoing.sequence is None and outgoing.num_all_settled == outgoing.num_chunks:
            del self._attempts[outgoing.attempt]
            if outgoing.given_up:
                self._tell(outgoing, Settled(outgoing.attempt, self._writers))

    def _tell(self, outgoing: _Outgoing, message: Message) -> None:
        self._send(outgoing.line, outgoing.reservation.decode, message)
