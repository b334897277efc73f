"""A rank's part in hand-offs, around its engine: the leader's decisions, each TP rank's writes and arrivals, and what they tell each other.

Leader and followers of a TP group turn together, so they talk through the group: a rank that has news says so in its ballot, and all
hear it behind that vote. Where there is no news it costs nothing.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from deepserve.engine.engine import Engine
from deepserve.engine.lockstep import Outcome, Wait
from deepserve.engine.pages import LIVE, PageState
from deepserve.engine.request import SequenceOutput
from deepserve.messages import Load, Place, Process
from deepserve.pd.decode import DecodeRole
from deepserve.pd.fence import Renew, Renewed, Retire, Retired, this_process
from deepserve.pd.messages import Message
from deepserve.pd.prefill import PrefillRole
from deepserve.pd.writer import Chunk, Halt, Report, Writer
from hw.select import open_transfer
from hw.transfer import KVTransfer, Part

ROLES = ("unified", "prefill", "decode")


class Arrived(msgspec.Struct, tag="arrived", array_like=True, frozen=True):
    """A rank of a decode instance to its leader: this part is in place here."""

    part: Part


News = Chunk | Halt | Report | Arrived | Renew | Renewed | Retire | Retired


class HandOffs:
    """Hand-offs of one rank of a prefill or decode instance."""

    def __init__(
        self,
        role: str,
        place: Place,
        engine: Engine,
        send: Callable[[Any, Place | None, Message], None],
        adopt: Callable[[str, Any], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Collective over the TP group. send: a message on a line to a place, None: the router. adopt: see `DecodeRole`.

        Raises ValueError for an unknown role, Unsupported where nothing can move the pages.
        """
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
        self._engine, self._tp, self._clock = engine, engine.groups.tp, clock
        self._name, self._caches = f"{place.instance}.{engine.groups.rank}", engine.runner.caches
        self._transfer = open_transfer(self._name, self._caches)
        self._retiring: KVTransfer | None = None  # an earlier one
        self.writers: list[Process] = []  # of a prefill instance: the ranks of the TP group
        self._parts: list[Part] = []  # that have arrived here, unless this is a prefill instance
        self._reports: list[Report] = []  # of this rank's writes
        self._outbox: list[News] = []  # for the other ranks of the TP group
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[News])
        self._writer = Writer(self._transfer, len(self._caches), self._tp.rank, self._tp.size, clock) if role == "prefill" else None
        self._prefill: PrefillRole | None = None
        self._decode: DecodeRole | None = None
        leads, scheduler = engine.groups.is_leader, engine.scheduler
        if role == "prefill":
            every = self._gather(msgspec.msgpack.encode(this_process()))
            self.writers = [msgspec.msgpack.decode(one, type=Process) for one in every]
            self._prefill = PrefillRole(scheduler, self.writers, self._command, send) if leads else None
        if role == "decode":
            every = self._gather(self._transfer.describe())
            self._decode = DecodeRole(scheduler, place, every, self._command, send, adopt) if leads else None

    def _gather(self, mine: bytes) -> list[bytes]:
        """What each rank of the TP group has. Collective over it."""
        return [self._tp.broadcast_bytes(mine if idx == self._tp.rank else None, idx) for idx in range(self._tp.size)]

    @property
    def has_news(self) -> bool:
        """Whether the other ranks of the TP group must hear something."""
        return bool(self._outbox)

    @property
    def has_work(self) -> bool:
        """Whether a hand-off may still succeed."""
        if self._decode is not None:
            return self._decode.is_live or self._decode.num_asked > 0
        return self._prefill is not None and self._prefill.is_live

    @property
    def wait(self) -> Wait:
        """What this rank waits for where it has nothing to run."""
        leader = self._prefill or self._decode
        if leader is None:
            return Wait.MESSAGE
        if leader.is_live:
            return Wait.LOOK
        return Wait.WHILE if leader.is_unsettled else Wait.MESSAGE

    def on_message(self, line: Any, peer: Place | None, message: Message) -> None:
        """From a place, None: the router. Messages that are not for this role mean nothing to it."""
        if self._prefill is not None:
            self._prefill.on_message(line, peer, message, self._clock())
        if self._decode is not None:
            self._decode.on_message(line, message, self._clock())

    def abort(self, request_ids: list[str]) -> None:
        """End what these requests have here."""
        if self._prefill is not None:
            self._prefill.abort(request_ids)
        if self._decode is not None:
            self._decode.abort(request_ids, self._clock())

    def forget(self, line: Any) -> None:
        """A line broke: end what came on it."""
        if self._prefill is not None:
            self._prefill.forget(line)
        if self._decode is not None:
            self._decode.forget(line, self._clock())

    def look(self) -> bool:
        """See what has moved; whether there is anything for `turn` to act on."""
        self._parts += [part for transfer in self._transfers for _, part in transfer.poll()]
        if self._writer is not None:
            self._reports += self._writer.poll()
        return bool(self._parts or self._reports)

    def turn(self) -> list[SequenceOutput]:
        """Before a step is planned, and none is half told: act on what has moved. News for clients."""
        now_s = self._clock()
        self.look()
        parts, reports, self._parts, self._reports = self._parts, self._reports, [], []
        if self._prefill is not None:
            for report in reports:
                self._prefill.on_report(0, report)
            self._prefill.turn(now_s)
            return []
        if self._decode is not None:
            if self._decode.is_offering:
                self._engine.runner.wait()  # drafts are written beside the host's work, to pages that may be given away now
            for part in parts:
                self._decode.on_part(0, part, now_s)
            return self._decode.turn(now_s)
        self._outbox += [*reports, *(Arrived(part) for part in parts if self._writer is None)]
        return []

    def take(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """What of a step's news is for clients of this instance."""
        return outputs if self._prefill is None else self._prefill.take(outputs)

    def exchange(self, outcome: Outcome) -> None:
        """Behind a vote: hear what the TP group has to say. Collective over it."""
        for transfer in self._transfers:
            transfer.set_active(outcome.wait is not Wait.MESSAGE)
        for idx, rank in enumerate(self._tp.ranks):
            if rank not in outcome.news:
                continue
            mine = idx == self._tp.rank
            data = self._tp.broadcast_bytes(self._encoder.encode(self._outbox) if mine else None, idx)
            if mine:
                self._outbox = []
            else:
                for news in self._decoder.decode(data):
                    self._hear(idx, news)

    def _hear(self, rank: int, news: News) -> None:
        match news:
            case Chunk() | Halt() if self._writer is not None:
                self._writer.execute(news)
            case Report() if self._prefill is not None:
                self._prefill.on_report(rank, news)
            case Arrived(part) if self._decode is not None:
                self._decode.on_part(rank, part, self._clock())
            case Renewed() | Retired() if self._decode is not None:
                self._decode.on_answer(rank, news)
            case Renew() | Retire() if self._tp.rank != 0:
                self._outbox.append(self._switch(news))

    def _command(self, command: Chunk | Halt | Renew | Retire) -> None:
        """To every rank of the TP group, from its leader."""
        if self._tp.size > 1:
            self._outbox.append(command)
        if isinstance(command, Chunk | Halt):
            self._writer.execute(command)
        else:
            self._decode.on_answer(0, self._switch(command))

    def _switch(self, command: Renew | Retire) -> Renewed | Retired:
        """Of a decode rank: open a new transfer for its pages, or close the one before."""
        if isinstance(command, Renew):
            self._retiring, self._transfer = self._transfer, open_transfer(self._name, self._caches)
            return Renewed(self._transfer.describe())
        self._retiring.close()
        self._retiring = None
        return Retired()

    def load(self, load: Load) -> Load:
        """With what hand-offs add to it."""
        scheduler, pages = self._engine.scheduler, self._engine.pages
        unfinished = (*scheduler.running, *scheduler.waiting)
        return msgspec.structs.replace(
            load,
            num_waiting=load.num_waiting + (0 if self._decode is None else self._decode.num_asked),
            num_queued_tokens=sum(max(0, sequence.num_prompt - sequence.num_computed) for sequence in unfinished),
            num_transfer_pages=pages.num_transferred(*LIVE),
            num_quarantined_pages=pages.num_transferred(PageState.QUARANTINED),
        )

    def check(self) -> None:
        """Audit of the scheduler and its pages, with those that hand-offs hold. AssertionError says what is wrong."""
        leader = self._prefill or self._decode
        self._engine.scheduler.check([] if leader is None else leader.held)

    @property
    def _transfers(self) -> list[KVTransfer]:
        return [self._transfer] if self._retiring is None else [self._retiring, self._transfer]

    def close(self) -> None:
        for transfer in self._transfers:
            transfer.close()
