"""The process that plans: answers as if asked here, and is followed by another one when it dies."""

import numpy as np
import psutil
import pytest

from eplb.config import EPLBConfig
from eplb.decide import Costs
from eplb.load import LoadProfile
from eplb.pack import Layout
from eplb.planner import Planner, Question, answer

WAIT_S = 60.0
LAYOUT = Layout(num_logical=8, num_ranks=4, slots_per_rank=3)
COSTS = Costs(token_s=1.0, expert_bytes=1, node_bytes_per_s=1e9, network_bytes_per_s=1e9)
CURRENT = np.tile(np.arange(12) % 8, (3, 1))


def question(num_steps: int = 10, *, regrouped: bool = False) -> Question:
    tokens = np.random.randint(0, 100, (2, 3, 8)) * (num_steps > 0)
    return Question(LoadProfile((1, 2, 5), num_steps, tokens), CURRENT, LAYOUT, COSTS, EPLBConfig(step_interval=10), regrouped)


def test_the_process_answers_and_is_replaced():
    planner = Planner()
    asked = question()
    expected = answer(asked)[0]
    assert not np.array_equal(expected, CURRENT), "nothing to be gained; the test shows nothing"
    assert np.array_equal(planner.ask(asked).result(WAIT_S), expected)
    process = psutil.Process(planner._process.pid)
    process.kill()
    process.wait(WAIT_S)
    assert np.array_equal(planner.ask(asked).result(WAIT_S), CURRENT)
    assert np.array_equal(planner.ask(asked).result(WAIT_S), expected), "its successor"
    successor = psutil.Process(planner._process.pid)
    del planner
    successor.wait(WAIT_S)


@pytest.mark.parametrize("num_steps", [0, 10])
def test_a_placement_that_nobody_has_looked_at_is_made_even(num_steps: int):
    """Also where nothing was counted, or moving costs more than it saves."""
    asked = question(num_steps, regrouped=True)
    load = asked.profile.load() if num_steps else np.ones((3, 8))
    shares = np.array([np.bincount(row, minlength=8) for row in answer(asked)[0]])
    ranks = (np.take_along_axis(load / shares, answer(asked)[0], -1)).reshape(3, 4, 3).sum(-1)
    assert (ranks.mean(-1) / ranks.max(-1) > 0.75).all()
    assert np.array_equal(answer(question(0))[0], CURRENT)
