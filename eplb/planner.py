"""Plans in a process of their own: planning keeps Python's lock busy, which the steps of rank 0 need.

The process loads no torch, and ends when its stdin does, with whoever started it.
"""

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eplb.config import EPLBConfig
from eplb.decide import Costs, decide
from eplb.load import LoadProfile
from eplb.pack import Layout
from eplb.plan import plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """What to plan from."""

    profile: LoadProfile
    current: np.ndarray  # [layers, num_physical] int64, phy2log
    layout: Layout
    costs: Costs
    config: EPLBConfig
    regrouped: bool  # nobody has looked at this placement's balance yet, so it is made even, whatever that gains


def answer(question: Question) -> tuple[np.ndarray, str]:
    """The placement to have, like `current`, and a sentence about it. Leaves the load profile where the config wants it."""
    profile, current, layout, config = question.profile, question.current, question.layout, question.config
    if config.dump_profile is not None:
        _dump(profile, Path(config.dump_profile))
    if not profile.num_steps and not question.regrouped:
        return current, "nothing was counted yet"
    load = profile.load()
    found = plan(load if load.any() else np.ones_like(load), current, layout, tolerance=config.tolerance)
    if question.regrouped:
        return found.phy2log, f"expert balance {found.balancedness_before.mean():.3f}, planned {found.balancedness_after.mean():.3f}"
    steps = {"window_steps": profile.num_steps, "horizon_steps": config.step_interval}
    decision = decide(found, layout, question.costs, **steps, hysteresis=config.hysteresis)
    kept = found.only(decision.layers, current)
    gain_s, cost_s = (seconds[decision.layers].sum() for seconds in (decision.gain_s, decision.cost_s))
    return kept.phy2log, (
        f"expert balance {found.balancedness_before.mean():.3f}, planned {kept.balancedness_after.mean():.3f} by moving "
        f"{kept.moves.num_remote} experts of {decision.layers.sum()} layers ({gain_s:.3f} s saved until the next look, {cost_s:.3f} spent)"
    )


class Planner:
    """Asks the process, from a thread that waits for it."""

    def __init__(self):
        """Starts the process; it is ready for the first question after some 0.2 s."""
        self._thread = ThreadPoolExecutor(1, "eplb")
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "eplb.planner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._end = weakref.finalize(self, _end, self._process)

    def ask(self, question: Question) -> "Future[np.ndarray]":
        """The placement to have; that of today if the process proves to be gone, which another one follows then."""
        return self._thread.submit(self._ask, question)

    def _ask(self, question: Question) -> np.ndarray:
        try:
            pickle.dump(question, self._process.stdin)
            self._process.stdin.flush()
            phy2log, sentence = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            logger.error("the planner is gone, experts stay where they are until the next look: %s", repr(error))
            self._end()
            self._start()
            return question.current
        logger.info(sentence)
        return phy2log


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(OSError):  # a question that it did not read
        process.stdin.close()


def _dump(profile: LoadProfile, path: Path) -> None:
    """Whoever reads the file finds a whole one. A full disk is no reason to stop serving."""
    part = path.with_name(path.name + ".part")
    try:
        profile.dump(part)
        os.replace(part, path)
    except OSError as error:
        logger.warning("cannot write the load profile %s: %s", path, error)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asks
    while True:
        try:
            question = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(answer(question), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    # Under its own name, by which what is pickled here is known to the other side.
    from eplb import planner

    planner.main()
