"""Drafts change no token: greedy and sampled, with every parameter, cut, preempted, lost, asynchronous and captured.

Compared are whole stories, log-probabilities included, with `batch_invariant`, so to the last bit.
"""

import dataclasses
import gc
from collections.abc import Callable

import pytest
import torch

from deepserve.config import SpeculativeConfig
from deepserve.engine import sampler, state
from deepserve.engine.engine import Engine
from deepserve.engine.runner import Runner
from hw.cpu.guess_head import NativeGuessHead
from hw.cpu.native import open_kernels
from tests.deepserve.engine.drafting import minimal_mtp_folder, tell_drafts
from tests.deepserve.engine.driving import Driver, Request, calm, golden_cases, make_engine, run_alone, run_together
from tests.deepserve.engine.test_engine_same import shipped_requests
from tests.deepserve.engine.world import Story


def mtp(num_drafts: int, *, adaptive: bool = False) -> dict:
    return {"speculative_config": SpeculativeConfig(num_speculative_tokens=num_drafts, adaptive=adaptive)}


def guess_head(engine: Engine) -> NativeGuessHead:
    """Also on a CPU where an engine has none, because it would not be quicker there."""
    return NativeGuessHead(open_kernels(), engine.backend.runtime.empty, engine.runner.model.head)


@pytest.mark.parametrize("guessed", [False, True], ids=["head", "head in 8 bits"])
def test_drafts_of_the_shipped_model_are_the_references(guessed):
    """What transformers' MTP module drafts, teacher-forced: each next token is known when a draft is made behind it."""
    engine = make_engine(**mtp(1))
    drafter, drafted, num_equal, num_all = engine.runner.drafter, [], 0, 0
    engine.runner.model._guess_head = guess_head(engine) if guessed else None
    best = drafter._best
    drafter._best = lambda hidden: (found := best(hidden), drafted.append(int(found[0])))[0]
    for case in golden_cases():
        drafted.clear()
        (story,) = run_together(engine, [Request(case["prompt_ids"], {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True})])
        assert story.tokens == case["output_ids"][:24]
        known = 1  # the draft that is made with so many tokens known stands or falls with the next one
        for draft in drafted:
            if known >= 24:
                break
            num_equal += draft == case["mtp_draft_ids"][known - 1]
            num_all += 1
            known += 1 + (draft == case["output_ids"][known])
    assert num_all > 100
    assert num_equal == num_all if not guessed else 0.94 * num_all <= num_equal < num_all, (num_equal, num_all)


def test_drafts_from_a_wrong_head_change_nothing_but_the_speed():
    requests = [Request(case["prompt_ids"], {"max_tokens": 16, "temperature": 0.0}) for case in golden_cases()[:4]]
    right, wrong = make_engine(**mtp(2)), make_engine(**mtp(2))
    wrong.runner.model._guess_head = head = guess_head(wrong)
    head.fill(torch.randn_like(wrong.runner.model.head))
    stories = [run_together(engine, requests) for engine in (right, wrong)]
    assert [story.tokens for story in stories[0]] == [story.tokens for story in stories[1]]
    assert right.load().num_accepted_tokens > 10 > wrong.load().num_accepted_tokens


def test_an_engine_that_goes_waits_for_its_drafts():
    """They read its weights and caches, on another thread, and an idle engine has not waited for them."""
    engine, waits = make_engine(**mtp(1)), []
    run_together(engine, [Request(golden_cases()[0]["prompt_ids"], {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True})])
    graphs = engine.runner.graphs
    wait, graphs.wait = graphs.wait, lambda: (waits.append(True), wait())
    del engine
    gc.collect()
    assert waits


# The same tokens


@pytest.fixture(scope="module")
def alone() -> list[Story]:
    """Each request by itself, without drafts and prefix cache."""
    torch.set_num_threads(1)
    return run_alone(make_engine(batch_invariant=True, enable_prefix_caching=False), shipped_requests())


FEW_PAGES = {"num_pages": 6, "max_model_len": 384}
WAYS = {
    "1 draft": (mtp(1), calm),
    "2 drafts, chunks of 7": (mtp(2) | {"max_num_batched_tokens": 7}, calm),
    "4 drafts, short chunks": (mtp(4) | {"long_prefill_token_threshold": 11, "max_num_batched_tokens": 64}, calm),
    "2 drafts, few pages": (mtp(2) | FEW_PAGES, calm),
    "2 drafts, few rows, throughput experts": (mtp(2) | {"max_num_seqs": 3, "max_dispatch_tokens_per_rank": 1, "graphs": False}, calm),
    "1 draft, preempted": (mtp(1) | {"max_num_batched_tokens": 60}, Driver.preempt),
    "4 drafts, every step lost once": (mtp(4) | {"max_num_batched_tokens": 100}, Driver.discard),
    "adaptive": (mtp(4, adaptive=True), calm),
    "asynchronous": (mtp(2) | FEW_PAGES | {"async_scheduling": True}, calm),
    "asynchronous, adaptive": (mtp(4, adaptive=True) | {"async_scheduling": True, "max_num_seqs": 4}, calm),
    "asynchronous, preempted": (mtp(4) | {"async_scheduling": True}, Driver.preempt),
    "captured": (mtp(2) | {"graphs": True, "max_num_seqs": 11}, calm),
    "captured, asynchronous": (mtp(1) | {"graphs": True, "async_scheduling": True, "max_num_seqs": 5, "max_num_batched_tokens": 32}, calm),
}


@pytest.mark.parametrize("way", WAYS)
def test_shipped_model(alone, way):
    args, disturb = WAYS[way]
    engine = make_engine(batch_invariant=True, **args)
    assert run_together(engine, shipped_requests(), disturb) == alone
    stats = engine.scheduler.stats
    assert sum(stats.num_accepted_by_position) == stats.num_accepted_tokens
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens or "lost" in way  # with a step its drafts are lost
    assert stats.num_preemptions > 0 or "preempted" not in way
    if way == "1 draft":  # the same again, from the prefix cache, alone
        hits = stats.num_prefix_hit_tokens
        assert run_alone(engine, shipped_requests()) == alone
        assert stats.num_prefix_hit_tokens > hits


def penalized_requests() -> list[Request]:
    """Penalties that matter: some draw the same tokens again and again, some never a second time."""
    penalties = [(2.0, 2.0, 1.0), (-2.0, -2.0, 1.0), (0.0, -1.0, 1.3), (0.0, 0.0, 0.5), (0.0, 0.0, 1.8), (-1.0, 0.3, 1.0)]
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    return [
        Request(case["prompt_ids"], {"max_tokens": 24, "seed": i, "ignore_eos": True, **dict(zip(names, penalties[i % 6], strict=True))})
        for i, case in enumerate(golden_cases()[:12])
    ]


@pytest.fixture(scope="module")
def penalized() -> list[Story]:
    torch.set_num_threads(1)
    return run_together(make_engine(batch_invariant=True), penalized_requests())


@pytest.mark.parametrize(
    "way", ["2 drafts, few pages", "4 drafts, every step lost once", "asynchronous, preempted", "captured, asynchronous"]
)
def test_penalties_see_the_drafts_before_a_draw(penalized, way):
    args, disturb = WAYS[way]
    assert run_together(make_engine(batch_invariant=True, **args), penalized_requests(), disturb) == penalized


def test_a_random_model_accepts_next_to_nothing_and_draws_the_same(tmp_path):
    args = {"model": minimal_mtp_folder(tmp_path), "load_format": "dummy", "batch_invariant": True}
    lengths = [1, 2, 16, 17, 63, 64, 65, 130]
    common = {"ignore_eos": True, "logprobs": 2, "max_tokens": 20}
    requests = [
        Request(
            [3 + (i * 7 + j * j) % 60 for j in range(length)], {**common, "seed": i, "temperature": float(i % 2), "top_k": 30 * (i % 3)}
        )
        for i, length in enumerate(lengths)
    ]
    expected = run_together(make_engine(**args), requests)
    for num_drafts, disturb in ((1, Driver.discard), (2, calm), (4, Driver.preempt), (4, Driver.discard)):
        assert run_together(make_engine(**args, **mtp(num_drafts)), requests, disturb) == expected, (num_drafts, disturb)


def test_without_drafts_the_latents_of_prompts_are_written_all_the_same():
    """In chunks, the second beside a sequence that decodes; so that drafts are as good as ever when they pay again."""
    requests = [Request(case["prompt_ids"], {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}) for case in golden_cases()[:2]]
    caches = []
    for chosen in (1, 0):
        engine = make_engine(**mtp(1, adaptive=True), long_prefill_token_threshold=9, enable_prefix_caching=False)
        engine.scheduler.drafts.choose = lambda num_seqs, chosen=chosen: chosen
        run_together(engine, requests)
        assert (engine.load().num_draft_tokens > 0) == bool(chosen)
        caches.append(engine.runner.caches[-1])
    pages, num_slots = [0, 1], [len(request.prompt) for request in requests]
    assert max(num_slots) <= caches[0].shape[1], "a page each"
    for page, num in zip(pages, num_slots, strict=True):
        rows = [cache[page, :num] for cache in caches]
        assert rows[0].abs().amin(-1).max() > 0 and torch.equal(*rows)


def test_aborts_leave_nothing_behind(tmp_path):
    engine = make_engine(model=minimal_mtp_folder(tmp_path), load_format="dummy", async_scheduling=True, **mtp(4))
    driver = Driver(engine)
    for i in range(6):
        driver.submit(f"r{i}", Request([3 + i] * (60 + i), {"max_tokens": 40, "ignore_eos": True, "n": 1 + i % 2}))
    for i in range(6):
        driver.step()
        driver.step()
        engine.abort([f"r{i}"])
        engine.scheduler.check()
    driver.finish()


# Ends inside a run of accepted drafts


SEED = 1  # whose first tokens differ


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Callable[..., tuple[Engine, Request, list[int], Engine]]:
    """`told(asynchronous, **params)`: an engine that drafts 8 right tokens each time, a request, its tokens, an engine that drafts none.

    The first step draws one token, the next one nine.
    """
    torch.set_num_threads(1)
    args = {"model": minimal_mtp_folder(tmp_path_factory.mktemp("told")), "load_format": "dummy", "batch_invariant": True}
    args["enable_prefix_caching"] = False  # one engine serves many tests
    settings = {"max_tokens": 30, "temperature": 2.0, "seed": SEED, "ignore_eos": True, "logprobs": 1}
    plain = make_engine(**args)
    (story,) = run_together(plain, [Request([5, 9, 20], settings)])
    assert len(set(story.tokens[:10])) == 10, "an end at one place must be none at another"
    engines = {asynchronous: make_engine(**args, **mtp(8), async_scheduling=asynchronous) for asynchronous in (False, True)}
    for engine in engines.values():
        tell_drafts(engine, [5, 9, 20, *story.tokens])

    def get(asynchronous: bool = False, **params) -> tuple[Engine, Request, list[int], Engine]:
        return engines[asynchronous], Request([5, 9, 20], {**settings, **params}), story.tokens, plain

    return get


def end_of(engine: Engine, request: Request) -> tuple[Story, int]:
    """And how many tokens the engine counted for it."""
    before = engine.scheduler.stats.num_generated_tokens
    (story,) = run_together(engine, [request])
    return story, engine.scheduler.stats.num_generated_tokens - before


def test_all_drafts_stand_when_they_are_right(told):
    engine, request, tokens, _ = told()
    before = engine.load()
    story, num_generated = end_of(engine, request)
    assert story.tokens == tokens and num_generated == 30
    after = engine.load()
    assert after.num_steps - before.num_steps == 5  # 1 + 9 + 9 + 9 + 2
    drafted, accepted = (getattr(after, name) - getattr(before, name) for name in ("num_draft_tokens", "num_accepted_tokens"))
    assert accepted == drafted == 8 * 3 + 1


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("place", range(10))
def test_stop_token_at_every_place_of_a_run(told, place, asynchronous):
    _, _, tokens, plain = told()
    engine, request, _, _ = told(asynchronous, stop_token_ids=[tokens[place]])
    story, num_generated = end_of(engine, request)
    (wanted,) = run_together(plain, [request])
    assert story == wanted and story.tokens == tokens[: place + 1] and num_generated == place + 1
    assert (story.finish_reason, story.stop_token_id, len(story.logprobs)) == ("stop", tokens[place], place + 1)


@pytest.mark.parametrize("place", range(10))
def test_end_of_sequence_at_every_place_of_a_run(told, monkeypatch, place):
    engine, request, tokens, _ = told(ignore_eos=False, min_tokens=min(place, 4))
    config = dataclasses.replace(engine.scheduler.config, eos_token_ids=frozenset({tokens[place]}))
    monkeypatch.setattr(engine.scheduler, "config", config)
    story, num_generated = end_of(engine, request)
    assert (story.tokens, story.finish_reason, num_generated) == (tokens[: place + 1], "stop", place + 1)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_cap_at_every_place_of_a_run(told, max_tokens, asynchronous):
    engine, request, tokens, _ = told(asynchronous, max_tokens=max_tokens)
    story, num_generated = end_of(engine, request)
    assert (story.tokens, story.finish_reason, num_generated) == (tokens[:max_tokens], "length", max_tokens)
    assert len(story.logprobs) == max_tokens


@pytest.mark.parametrize("left", [pytest.param(left, marks=[] if left in (1, 5, 9, 10) else [pytest.mark.long]) for left in range(1, 11)])
def test_the_context_ends_inside_a_run(tmp_path, left):
    """No position beyond the model's last one is computed, nor a page beyond the cache's."""
    args = {"model": minimal_mtp_folder(tmp_path), "load_format": "dummy", "batch_invariant": True, "max_model_len": 64, "num_pages": 1}
    request = Request([3 + i % 50 for i in range(64 - left)], {"max_tokens": None, "temperature": 0.0, "ignore_eos": True})
    (wanted,) = run_together(make_engine(**args), [request])
    assert len(wanted.tokens) == left
    for flags in ({}, {"graphs": True, "async_scheduling": True, "max_num_seqs": 2}):
        engine = make_engine(**args, **mtp(8), **flags)
        tell_drafts(engine, request.prompt + wanted.tokens)
        assert run_together(engine, [request]) == [wanted]


# Planted errors


def accept_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts stand without being equal."""
    settle = state.RowState.settle

    def wrong(self, rows, tokens, num_decode, query_len):
        self.ahead[rows[:num_decode], 1:query_len] = tokens[: num_decode * query_len].view(num_decode, query_len)[:, :-1]
        return settle(self, rows, tokens, num_decode, query_len)

    monkeypatch.setattr(state.RowState, "settle", wrong)


def shift_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of verified positions is keyed one position off."""
    draw = Runner._draw
    monkeypatch.setattr(Runner, "_draw", lambda self, logits, runs, at, ids: draw(self, logits, runs, at + (runs[0][1] > 1), ids))


def forget_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties do not see the drafts before a draw."""
    monkeypatch.setattr(sampler._Seen, "with_drafts", lambda self, drafts: self.counts.repeat(len(drafts) + 1, 1))


def count_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws behind a wrong draft are counted as generated."""
    add = sampler._Seen.add
    monkeypatch.setattr(sampler._Seen, "add", lambda self, draws, num_kept: add(self, draws, torch.tensor(len(draws))))


def roll_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows move on as if all drafts had stood."""
    settle = state.RowState.settle

    def wrong(self, rows, tokens, num_decode, query_len):
        accepted, latest = settle(self, rows, tokens, num_decode, query_len)
        self.lens[rows[:num_decode]] += query_len - 1 - accepted
        return accepted, latest

    monkeypatch.setattr(state.RowState, "settle", wrong)


PLANTS = {accept_all: shipped_requests, shift_noise: shipped_requests, roll_nothing_back: shipped_requests}
PLANTS |= {forget_drafts: penalized_requests, count_all: penalized_requests}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_error_is_found(alone, penalized, monkeypatch, plant):
    plant(monkeypatch)
    requests = PLANTS[plant]()
    try:
        found = run_together(make_engine(batch_invariant=True, **mtp(2)), requests)
    except IndexError:
        return  # a row is where it cannot be
    assert found != (alone if PLANTS[plant] is shipped_requests else penalized)


# The distribution of three positions


NUM_DRAWN = 4096


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> tuple[str, torch.Tensor]:
    """A model with 16 tokens, and `[16, 16, 16]`: how likely it goes on so, from its log-probabilities behind every prefix."""
    folder = minimal_mtp_folder(tmp_path_factory.mktemp("small"), vocab_size=16)
    engine = make_engine(model=folder, load_format="dummy")
    prefixes = [[], *([a] for a in range(16)), *([a, b] for a in range(16) for b in range(16))]
    params = {"max_tokens": 1, "logprobs": 16, "ignore_eos": True, "temperature": 0.0}
    tables = []
    for story in run_together(engine, [Request([3, 5, *prefix], params) for prefix in prefixes]):
        position = story.logprobs[0]
        found = dict(zip(position.token_ids, position.logprobs, strict=True))
        tables.append(torch.tensor([found[token] for token in range(16)], dtype=torch.float64).exp())
    first, second, third = tables[0], torch.stack(tables[1:17]), torch.stack(tables[17:]).view(16, 16, 16)
    return folder, first[:, None, None] * second[:, :, None] * third


def draw_three(folder: str, seed: int, guess: int) -> torch.Tensor:
    """Counts `[16, 16, 16]` of what is drawn with drafts. The module's own drafts are replaced by one good guess, so that many stand."""
    engine = make_engine(model=folder, load_format="dummy", max_num_seqs=128, **mtp(2))
    engine.runner.drafter._best = lambda hidden: torch.full((len(hidden),), guess)
    seeds = [7919 * seed + 131 * i for i in range(NUM_DRAWN // 128)]
    requests = [Request([3, 5], {"max_tokens": 3, "n": 128, "seed": seed, "ignore_eos": True}) for seed in seeds]
    counts = torch.zeros(16, 16, 16, dtype=torch.float64)
    for story in run_together(engine, requests):
        counts[tuple(story.tokens)] += 1
    assert engine.load().num_accepted_tokens > NUM_DRAWN // 20
    return counts


def misfit(counts: torch.Tensor, exact: torch.Tensor) -> float:
    """Chi-square per cell, over cells of at least five expected draws and one cell of all others: 1 for the right distribution."""
    expected = exact.flatten() * counts.sum()
    large = expected >= 5
    wanted = torch.cat((expected[large], expected[~large].sum()[None]))
    found = torch.cat((counts.flatten()[large], counts.flatten()[~large].sum()[None]))
    return float(((found - wanted) ** 2 / wanted).sum() / (len(wanted) - 1))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_joint_distribution_of_three_positions(exact, seed):
    folder, wanted = exact
    assert abs(float(wanted.sum()) - 1) < 1e-5
    assert misfit(draw_three(folder, seed, guess=int(wanted.sum((0, 2)).argmax())), wanted) < 1.4  # 126 degrees of freedom: 1 +- 0.13


def test_drafts_that_stand_unasked_bend_the_distribution(exact, monkeypatch):
    folder, wanted = exact
    accept_all(monkeypatch)
    assert misfit(draw_three(folder, 1, guess=int(wanted.sum((0, 2)).argmax())), wanted) > 2
