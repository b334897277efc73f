"""A few processes that form groups over gloo, for tests: each runs the functions it is sent and answers with what came out.

    with Ranks(3, tmp_path) as ranks:
        results = ranks.run(function, argument)      # function(rendezvous, rank, argument) in every process, results in rank order

Starting them takes longer than most tests: the fixture `ranks_of` (tests/conftest.py) has some for all modules that leave them well.
Functions are sent by name, so they stand at the top of a test module. What has not answered after `WAIT_S` is killed.
"""

import copy
import io
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hw.groups import Rendezvous

WAIT_S = 60.0  # generous: machines that run tests are busy
TIMEOUT_S = 30.0  # of collectives, where a test is not about it


class Died(Exception):
    """The process of a rank ended instead of answering."""


class Ranks:
    """`size` processes. Leaving the context ends them."""

    def __init__(self, size: int, folder: Path, timeout_s: float = TIMEOUT_S):
        context = multiprocessing.get_context("spawn")
        self.size = size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, folder, timeout_s), daemon=True)
            process.start()
            theirs.close()  # so that its end is seen here
            self._pipes.append(ours)
            self._processes.append(process)

    def first(self, size: int) -> "Ranks":
        """The first `size` of them, as if they were all."""
        team = copy.copy(self)
        team.size, team._pipes, team._processes = size, self._pipes[:size], self._processes[:size]
        return team

    def run(self, function: Callable, *args: Any) -> list[Any]:
        """Results in rank order; raises the first error that a rank had."""
        outcomes = self.outcomes(function, *args)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(self, function: Callable, *args: Any) -> list[Any]:
        """For each rank what the function returned there, or the exception it raised, or `Died`."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((self.size, function, args)))
        found: dict[int, Any] = {}
        deadline = time.monotonic() + WAIT_S
        while len(found) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(waiting.values())} of {self.size} did not answer within {WAIT_S:g} s")
            for pipe in ready:
                found[waiting[pipe]] = _receive(pipe)
        return [found[rank] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _receive(pipe: Connection) -> Any:
    try:
        data = pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        return Died()
    return torch.load(io.BytesIO(data), weights_only=False)


def _serve(pipe: Connection, rank: int, folder: Path, timeout_s: float) -> None:
    """The process of a rank. Modules do not see each other's groups."""
    torch.set_num_threads(1)

    @cache
    def rendezvous(module: str, size: int) -> Rendezvous:
        return Rendezvous(dist.FileStore(str(folder / f"{module}-{size}"), size), timeout_s)

    while True:
        try:
            size, function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = function(rendezvous(function.__module__, size), rank, *args)
        except Exception as error:
            answer = error
        # Not `pipe.send`: that shares the memory of tensors with a process that may be gone.
        data = io.BytesIO()
        torch.save(answer, data)
        pipe.send_bytes(data.getvalue())
