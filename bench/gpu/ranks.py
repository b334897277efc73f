"""Ranks of one instance inside a bench: a process each if there are several, in lockstep as under a server."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch.distributed as dist
import zmq

from deepserve.engine.engine import Engine
from deepserve.engine.lockstep import Ballot, Lockstep
from deepserve.engine.request import SequenceOutput
from hw.groups import Groups, Rendezvous, open_groups
from hw.topology import ParallelConfig

TIMEOUT_S = 300.0  # by which ranks may differ in starting


class Stepper:
    """One rank's turns of the engine loop, without requests from outside."""

    def __init__(self, engine: Engine):
        """Collective over all ranks."""
        self.engine = engine
        parallel, rank = engine.config.parallel, engine.groups.rank
        self._dp_rank, self._leads = parallel.place(rank).dp, engine.groups.is_leader
        cap = engine.config.args.max_dispatch_tokens_per_rank
        self._lockstep = Lockstep(engine.groups, zmq.Context.instance(), cap, captured=engine.captures, overlap=engine.overlap)
        self.plan_s = 0.0  # of the latest step
        self.outputs: list[SequenceOutput] = []  # that the latest step brought

    def step(self) -> bool:
        """One step of all ranks. Returns whether anybody had something to do."""
        engine, started = self.engine, time.perf_counter()
        plan = engine.plan()
        self.plan_s = time.perf_counter() - started
        ballot = Ballot()
        if self._leads:
            num_tokens, num_drafts = (0, 0) if plan is None else (plan.num_tokens, plan.num_drafts)
            ballot = Ballot(num_tokens, engine.has_work, engine.has_launched, num_drafts=num_drafts)
        outcome = self._lockstep.vote(ballot)
        self.outputs = []
        if outcome.idle:
            return False
        if outcome.collect:
            self.outputs = engine.collect()
        else:
            has_tokens = outcome.num_tokens[self._dp_rank] > 0
            self.outputs = engine.run(plan, outcome.step, has_tokens=has_tokens, num_drafts=outcome.num_drafts)
        return True


def run_ranks(parallel: ParallelConfig, work: Callable[[Groups, Any], Any], args: Any) -> None:
    """`work(groups, args)` of every rank; in this process if there is one, else in one process for each. Rank 0 does the printing."""
    if parallel.num_ranks == 1:
        work(open_groups(parallel, 0), args)
        return
    context = multiprocessing.get_context("spawn")
    ended: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [context.Process(target=_run, args=(parallel, rank, folder, work, args, ended)) for rank in range(parallel.num_ranks)]
        for job in jobs:
            job.start()
        try:
            for _ in jobs:
                _wait(ended, jobs)
        finally:
            for job in jobs:
                job.kill()
                job.join()


def _wait(ended: Any, jobs: list) -> None:
    while True:
        try:
            return ended.get(timeout=1.0)
        except Empty:
            if any(job.exitcode for job in jobs):
                raise SystemExit("a rank failed; its words are above") from None


def _run(parallel: ParallelConfig, rank: int, folder: str, work: Callable[[Groups, Any], Any], args: Any, ended: Any) -> None:
    rendezvous = Rendezvous(dist.FileStore(f"{folder}/rendezvous", parallel.num_ranks), TIMEOUT_S)
    groups = open_groups(parallel, rank, rendezvous)
    work(groups, args)
    groups.world.barrier()  # nobody leaves while kernels of others may reach for its memory
    ended.put(rank)
    time.sleep(TIMEOUT_S)  # until it is killed: libraries that end in an order of their own may hang
