"""Shutting out writers of which nobody can say that they are done, so that pages they might still write to can be used again.

What reaches memory through a device or a connection of the reader's own (RDMA, TCP) does so by a registration that the reader can end:
it opens a second transfer for later attempts, lets those of the first one finish, and closes the first. What a process of the same
machine copies by itself (from memory to memory, or between GPUs) nobody can refuse: such a process must be gone.
"""

import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import msgspec

from deepserve.messages import Process

FINISH_S = 5.0  # for attempts of the first transfer, once there is a second one


class Renew(msgspec.Struct, tag="renew", array_like=True, frozen=True):
    """Leader of a decode rank to its TP group: open a transfer beside the one that there is."""


class Renewed(msgspec.Struct, tag="renewed", array_like=True, frozen=True):
    """Answer of each rank: how the new one is reached."""

    description: bytes


class Retire(msgspec.Struct, tag="retire", array_like=True, frozen=True):
    """Leader of a decode rank to its TP group: close the older transfer."""


class Retired(msgspec.Struct, tag="retired", array_like=True, frozen=True):
    """Answer of each rank: nothing comes through it any more."""


def this_process() -> Process:
    """As other processes of this machine find it. Linux only."""
    return Process(_machine(), os.getpid(), _stat(os.getpid())[1])


def may_write(process: Process) -> bool:
    """Whether it may be running on this machine: also where containers hide it from this process. Elsewhere it can be shut out."""
    boot, own = process.machine.split()[0], _machine()
    if boot != own.split()[0]:
        return False
    if process.machine != own:
        return True
    try:
        num_threads, started = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return started == process.started and num_threads > 0


def _machine() -> str:
    """Boot of the kernel, and which process numbers are meant."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[int, int]:
    """Threads that run, and clock ticks from boot to its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # names may hold anything
    # The first thread of a process stays as a zombie until all have ended and somebody asks how.
    return int(fields[17]) - (fields[0] in "ZX"), int(fields[19])


class _Stage(Enum):
    OPEN = "one transfer"
    RENEWING = "a second one is being opened"
    FINISHING = "attempts of the first one come to their end"
    RETIRING = "the first one is being closed"


class Fence:
    """Of the leader of a decode rank. `generation` numbers transfers; the first `num_retired` are closed."""

    def __init__(self, descriptions: list[bytes], command: Callable[[Renew | Retire], None]):
        """descriptions: of the pages of each rank of the TP group, which `command` reaches."""
        self.descriptions = descriptions
        self.generation = 0
        self.num_retired = 0
        self._command = command
        self._stage = _Stage.OPEN
        self._answers: dict[int, bytes] = {}  # by TP rank
        self._finish_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether attempts may begin."""
        return self._stage is not _Stage.RENEWING

    @property
    def is_busy(self) -> bool:
        """Whether an earlier transfer is yet to be closed."""
        return self._stage is not _Stage.OPEN

    def shut_out(self, now_s: float) -> None:
        """Begin to shut out the writers of all attempts so far; nothing if that is under way."""
        if self._stage is _Stage.OPEN:
            self._finish_s = now_s + FINISH_S
            self._ask(_Stage.RENEWING, Renew())

    def is_late(self, now_s: float) -> bool:
        """Whether attempts of the first transfer have had their time."""
        return self._stage is _Stage.FINISHING and now_s >= self._finish_s

    def finished(self) -> None:
        """No attempt of the first transfer can succeed any more."""
        if self._stage is _Stage.FINISHING:
            self._ask(_Stage.RETIRING, Retire())

    def on_answer(self, rank: int, answer: Renewed | Retired) -> None:
        """TP rank `rank` has done what it was told."""
        self._answers[rank] = answer.description if isinstance(answer, Renewed) else b""
        if len(self._answers) < len(self.descriptions):
            return
        if self._stage is _Stage.RENEWING:
            self.descriptions = [self._answers[idx] for idx in range(len(self.descriptions))]
            self.generation += 1
            self._stage = _Stage.FINISHING
        else:
            self.num_retired = self.generation
            self._stage = _Stage.OPEN

    def _ask(self, stage: _Stage, command: Renew | Retire) -> None:
        self._stage, self._answers = stage, {}
        self._command(command)
