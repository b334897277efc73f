"""Captured decode steps. On a CPU a capture repeats the work itself, on the same buffers; what is tested here is what goes into them."""

import pytest

from deepserve.config import EngineArgs
from deepserve.engine.engine import resolve
from deepserve.engine.graphs import graph_sizes
from tests.deepserve.engine.driving import Driver, Request, make_engine, minimal_folder

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 100, 128, 256, 1024])
def test_sizes_reach_the_largest_and_waste_little(largest):
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == largest
    for num_seqs in range(1, largest + 1):
        size = next(size for size in sizes if size >= num_seqs)
        assert size - num_seqs < max(8, 0.3 * num_seqs)


@pytest.fixture
def driver(tmp_path):
    engine = make_engine(model=minimal_folder(tmp_path), load_format="dummy", graphs=True, max_num_seqs=9, max_num_batched_tokens=64)
    return Driver(engine)


def spy(driver: Driver) -> list[int]:
    """Sizes of the graphs that are replayed."""
    graphs, replayed = driver.engine.runner.graphs, []
    for size, replay in graphs._replays.items():
        graphs._replays[size] = lambda size=size, replay=replay: (replayed.append(size), replay())[1]
    return replayed


def test_decode_steps_are_replayed_and_others_are_not(driver):
    replayed = spy(driver)
    for i in range(5):
        driver.submit(f"r{i}", Request([3 + i] * (4 + i), {**GREEDY, "max_tokens": 3 + i}))
    driver.step()
    assert replayed == [], "prefill"
    driver.finish()
    assert replayed == [8, 8, 4, 4, 2, 1]
    assert driver.engine.load().num_steps == 7


def test_prompt_logprobs_of_a_single_token_run_outside(driver):
    replayed = spy(driver)
    driver.submit("a", Request([5], {**GREEDY, "max_tokens": 1, "prompt_logprobs": 0}))
    driver.submit("b", Request([5], {**GREEDY, "max_tokens": 0}))
    driver.finish()
    assert replayed == []


def test_rows_left_over_touch_nothing(driver):
    """A large batch leaves its slots in the buffers; a smaller one in the same graph must not write there again."""
    for i in range(9):
        driver.submit(f"r{i}", Request([3 + i] * 5, {**GREEDY, "max_tokens": 2 if i else 40}))
    while len(driver.engine.scheduler.running) != 1:
        driver.step()
    caches = driver.engine.runner.caches
    page = driver.engine.scheduler.running[0].pages[0]
    before = [cache.clone() for cache in caches]
    for _ in range(5):
        driver.step()
    for cache, old in zip(caches, before, strict=True):
        changed = (cache != old).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [page]
    driver.finish()


def test_several_ranks_are_refused():
    with pytest.raises(ValueError, match="graphs of several ranks"):
        resolve(EngineArgs(graphs=True, data_parallel_size=2))
