"""What each TP rank of a prefill instance does for a hand-off: it writes its share of the layers, and tells its leader how that goes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from deepserve.messages import Place
from deepserve.pd.messages import Attempt
from hw.transfer import KVTransfer, Part, Write, WriteState, layer_share


class Chunk(msgspec.Struct, tag="chunk", array_like=True, frozen=True):
    """Leader to its TP group: these pages are computed, write them. The attempt's chunks come in order."""

    attempt: Attempt
    decode: Place
    descriptions: list[bytes]  # of the pages of each TP rank there
    pages: list[int]
    peer_pages: list[int]
    is_last: bool
    timeout_s: float


class Halt(msgspec.Struct, tag="halt", array_like=True, frozen=True):
    """Leader to its TP group: the attempt has failed, announce nothing more of it."""

    attempt: Attempt


class Report(msgspec.Struct, tag="report", array_like=True, frozen=True):
    """A rank to its leader: how its writes stand."""

    attempt: Attempt
    num_settled: int  # chunks, from the first on, of which nothing is under way
    error: str  # why a write failed; empty: none did


@dataclass
class _Job:
    chunks: list[list[Write]] = field(default_factory=list)
    ended: bool = False  # no more chunks come
    error: str = ""
    reported: tuple[int, str] = (0, "")


class Writer:
    """Writes of one TP rank."""

    def __init__(self, transfer: KVTransfer, num_regions: int, rank: int, num_ranks: int, clock: Callable[[], float]):
        """num_regions: of the cache; rank: of num_ranks in the TP group."""
        self._transfer, self._rank, self._clock = transfer, rank, clock
        self._share = layer_share(num_regions, rank, num_ranks)
        self._jobs: dict[Attempt, _Job] = {}
        self._names: dict[tuple[Place, int], str] = {}  # who is TP rank i of a decode rank now
        self._stale: set[str] = set()  # who was: another process, or an earlier transfer of this one

    def execute(self, command: Chunk | Halt) -> None:
        """Start what the leader says."""
        if isinstance(command, Halt):
            job = self._jobs.get(command.attempt)
            if job is not None:
                self._end(job)
            return
        job = self._jobs.setdefault(command.attempt, _Job())
        if job.ended:
            return
        job.ended = command.is_last
        writes: list[Write] = []
        job.chunks.append(writes)
        part = Part(command.attempt.transfer, command.attempt.epoch, self._rank, len(job.chunks) - 1, command.is_last)
        deadline_s = self._clock() + command.timeout_s
        try:
            for idx, description in enumerate(command.descriptions):
                peer = self._connect(command.decode, idx, description)
                writes.append(self._transfer.write(peer, part, self._share, command.pages, command.peer_pages, deadline_s))
        except ValueError as error:
            self._fail(job, str(error))

    def poll(self) -> list[Report]:
        """What has changed since the last call; `KVTransfer.poll` comes before it."""
        reports = []
        for attempt, job in list(self._jobs.items()):
            for write in (write for writes in job.chunks for write in writes):
                if write.state not in (WriteState.RUNNING, WriteState.DONE, WriteState.CANCELLED) and not job.error:
                    self._fail(job, f"a write to {write.peer.rsplit('-', 1)[0]} has {write.state.value.replace('_', ' ')}")
                    if write.state is WriteState.FAILED:  # the connection is gone; the next attempt makes a new one
                        self._transfer.disconnect(write.peer)
            pending = (idx for idx, writes in enumerate(job.chunks) if not all(write.settled for write in writes))
            num_settled = next(pending, len(job.chunks))
            if (num_settled, job.error) != job.reported:
                job.reported = num_settled, job.error
                reports.append(Report(attempt, num_settled, job.error))
            if job.ended and num_settled == len(job.chunks):
                del self._jobs[attempt]
        if self._stale:
            self._disconnect_stale()
        return reports

    def _connect(self, decode: Place, idx: int, description: bytes) -> str:
        name = self._transfer.connect(description)
        self._stale.add(self._names.get((decode, idx), name))
        self._stale.discard(name)
        self._names[decode, idx] = name
        return name

    def _disconnect_stale(self) -> None:
        """What is under way to them may still succeed."""
        writes = (write for job in self._jobs.values() for chunk in job.chunks for write in chunk)
        idle = self._stale - {write.peer for write in writes if not write.settled}
        for peer in idle:
            self._transfer.disconnect(peer)
        self._stale -= idle

    def _fail(self, job: _Job, error: str) -> None:
        job.error = error
        self._end(job)

    def _end(self, job: _Job) -> None:
        job.ended = True
        for writes in job.chunks:
            for write in writes:
                write.cancel()
