"""Captured decode steps. A CPU would record a step for every number of sequences; here it fills batches up, as GPUs do."""

import pytest
import torch

from deepserve.config import SpeculativeConfig
from deepserve.engine.graphs import DRAW_FIELDS, FIELDS, Layout, graph_sizes
from tests.deepserve.engine.drafting import minimal_mtp_folder
from tests.deepserve.engine.driving import Driver, Request, make_engine, minimal_folder, run_together

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 100, 128, 256, 1024])
def test_sizes_reach_the_largest_and_waste_little(largest):
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == largest
    for num_seqs in range(1, largest + 1):
        size = next(size for size in sizes if size >= num_seqs)
        assert size - num_seqs < max(8, 0.3 * num_seqs)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    monkeypatch.setattr("hw.cpu.runtime.CpuRuntime.captures_any_size", False)
    engine = make_engine(model=minimal_folder(tmp_path), load_format="dummy", graphs=True, max_num_seqs=9, max_num_batched_tokens=64)
    return Driver(engine)


def spy(driver: Driver) -> list[int]:
    """Sizes of the graphs that are replayed."""
    graphs, replayed = driver.engine.runner.graphs, []
    for key, replay in graphs._targets.items():
        graphs._targets[key] = lambda size=key[0], replay=replay: (replayed.append(size), replay())[1]
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


PLAIN = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.8, "min_p": 0.05, "n": 2},
    {"temperature": 1.1, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
]
# What is worked out behind the graph, from its logits.
BEHIND = [
    {"temperature": 1.0, "presence_penalty": 1.0},
    {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {5: 4.0, 30: -50.0}},
    {"temperature": 1.0, "min_tokens": 12, "ignore_eos": False},
    {"temperature": 0.7, "top_k": 20, "logprobs": 3},
]
ARGS = {"load_format": "dummy", "batch_invariant": True, "max_num_seqs": 9, "max_num_batched_tokens": 32}


def requests_of(settings: list[dict]) -> list[Request]:
    lengths = [1, 2, 17, 63, 64, 65, 30, 5]
    common = {"max_tokens": 14, "ignore_eos": True}
    return [
        Request([3 + (i * 7 + j * j) % 60 for j in range(length)], {**common, "seed": i, **settings[i % len(settings)]})
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("settings", [PLAIN, BEHIND, PLAIN + BEHIND, BEHIND + PLAIN], ids=["plain", "behind", "mixed", "mixed too"])
def test_draws_are_those_of_steps_that_are_not_captured(tmp_path, settings, asynchronous):
    args = {"model": minimal_folder(tmp_path), "async_scheduling": asynchronous, **ARGS}
    requests = requests_of(settings)
    expected = run_together(make_engine(**args), requests)
    assert len({str(story.tokens) for story in expected}) == len(expected)
    assert run_together(make_engine(graphs=True, **args), requests) == expected
    for disturb in (Driver.preempt, Driver.discard) if not asynchronous else (Driver.preempt,):
        assert run_together(make_engine(graphs=True, **args), requests, disturb) == expected


def draws_outside(driver: Driver) -> list[int]:
    """How many rows each draw outside a graph has."""
    runner, found = driver.engine.runner, []
    draw = runner._draw
    runner._draw = lambda logits, rows, *rest: (found.append(len(rows)), draw(logits, rows, *rest))[1]
    return found


def test_plain_rows_draw_inside_the_graph(driver):
    replayed, outside = spy(driver), draws_outside(driver)
    for i in range(3):
        driver.submit(f"r{i}", Request([3 + i] * 4, {**PLAIN[1 + i], "max_tokens": 6, "ignore_eos": True}))
    driver.finish()
    assert outside == [3] and replayed == [4] * 5, "prefill draws outside"


def test_a_row_that_needs_more_takes_its_step_behind_the_graph(driver):
    replayed, outside = spy(driver), draws_outside(driver)
    driver.submit("plain", Request([3] * 4, {"max_tokens": 6, "ignore_eos": True}))
    driver.submit("biased", Request([4] * 4, {"max_tokens": 3, "ignore_eos": True, "logit_bias": {7: 3.0}}))
    driver.finish()
    assert outside == [2, 2, 2] and replayed == [2, 2, 1, 1, 1]


@pytest.mark.parametrize("size, query_len", [(1, 1), (3, 2), (8, 3)])
def test_fields_are_packed_apart_and_aligned(size, query_len):
    layout = Layout(size, query_len)
    host, device = layout.fields, layout.device(torch.from_numpy(layout.packed))
    for i, name in enumerate(FIELDS):
        host[name][:] = i + 1
    for i, name in enumerate(FIELDS):
        num = size * query_len if name in DRAW_FIELDS else size
        assert device[name].tolist() == [i + 1] * num and device[name].storage_offset() * device[name].itemsize % 16 == 0


def test_drafts_in_graphs_that_are_filled_up(monkeypatch):
    """Seven sequences verify a draft each of 14 tokens, in graphs of a size that steps without drafts lack; others come in between."""
    monkeypatch.setattr("hw.cpu.runtime.CpuRuntime.captures_any_size", False)
    args = {"max_num_seqs": 9, "max_dispatch_tokens_per_rank": 14, "max_num_batched_tokens": 30, "batch_invariant": True}
    requests = [Request([3 + i] * (4 + i), {**GREEDY, "max_tokens": 5 + 2 * i}) for i in range(9)]
    expected = run_together(make_engine(**args), requests)
    replayed: set[int] = set()
    for num_drafts, wanted in ((1, {4, 7, 8}), (2, {4, 8})):
        replayed.clear()
        speculative = SpeculativeConfig(num_speculative_tokens=num_drafts, adaptive=False)
        engine = make_engine(**args, speculative_config=speculative)
        graphs = engine.runner.graphs
        assert {size for size, _ in graphs._drafters} == {1, 2, 4, 7, 8, 9}
        for key, replay in graphs._drafters.items():
            graphs._drafters[key] = lambda key=key, replay=replay: (replayed.add(key[0]), replay())[1]
        assert run_together(engine, requests) == expected
        assert replayed >= wanted


def test_drafts_that_cross_a_page_know_the_next_one(tmp_path):
    """Drafts behind a step that verifies none reach further than its tokens: not to what another step has left of its page table."""
    speculative = SpeculativeConfig(num_speculative_tokens=4)
    args = {"model": minimal_mtp_folder(tmp_path), "load_format": "dummy", "graphs": True, "num_pages": 6}
    engine = make_engine(**args, speculative_config=speculative)
    driver, page_size, left = Driver(engine), engine.config.page_size, 5
    driver.submit("r", Request([3 + i % 50 for i in range(page_size - 6)], {**GREEDY, "max_tokens": 30}))
    for chosen in (0, 4, 4, 4, 0, 4):
        engine.scheduler.drafts.choose = lambda num_seqs, chosen=chosen: chosen
        (sequence,) = engine.scheduler.running or [None]
        if sequence is not None and len(sequence.pages) == 2:
            with torch.inference_mode():
                engine.runner.graphs._page_table[:, 1] = left
        driver.step()
    assert (len(sequence.tokens), len(sequence.pages)) == (page_size, 2)
    engine.runner.wait()
    assert engine.runner.caches[-1][left].count_nonzero() == 0 and engine.runner.caches[-1][sequence.pages[1]].count_nonzero() > 0
