"""What runs in a step, in which order, and who gives way when pages run out. The runner is a fake that checks every plan."""

import dataclasses

import pytest

from deepserve.engine.step import StepResult
from tests.deepserve.engine.world import World


def prompt_of(length: int, first: int = 10) -> list[int]:
    return [first + i % 50 for i in range(length)]


# Batching


def test_a_request_joins_those_that_run():
    world = World()
    world.submit("a", prompt_of(6))
    assert world.counts(world.step()) == {"a": 6}
    world.submit("b", prompt_of(3, 20))
    plan = world.step()
    assert world.counts(plan) == {"a": 1, "b": 3}
    assert world.counts(world.step()) == {"a": 1, "b": 1}
    world.finish()


def test_decode_comes_before_prefill():
    world = World(max_num_batched_tokens=8)
    world.submit("long", prompt_of(20))
    world.submit("short", prompt_of(3, 30), max_tokens=9)
    assert world.counts(world.step()) == {"long": 8}
    assert world.counts(world.step()) == {"long": 8}
    assert world.counts(world.step()) == {"long": 4, "short": 3}
    world.submit("late", prompt_of(20, 40))
    plan = world.step()
    assert world.counts(plan) == {"long": 1, "short": 1, "late": 6}
    assert plan.num_decode == 2 and plan.counts == [1, 1, 6]
    world.finish()


def test_a_last_prompt_token_runs_as_decode():
    world = World(max_num_batched_tokens=8)
    world.submit("a", prompt_of(9))
    world.step()
    plan = world.step()
    assert (plan.starts, plan.counts, plan.num_decode, plan.draws) == ([8], [1], 1, [0])
    world.finish()


def test_chunks_fill_the_budget():
    world = World(max_num_batched_tokens=8)
    world.submit("a", prompt_of(20))
    world.finish()
    assert [plan.counts for plan in world.runner.plans[:3]] == [[8], [8], [4]]
    assert [plan.draws for plan in world.runner.plans[:3]] == [[], [], [0]]


def test_a_chunk_has_a_limit_of_its_own():
    world = World(max_num_batched_tokens=16, max_chunk_tokens=5)
    for name, first in (("a", 10), ("b", 20), ("c", 30), ("d", 40)):
        world.submit(name, prompt_of(12, first))
    assert world.counts(world.step()) == {"a": 5, "b": 5, "c": 5, "d": 1}
    assert world.counts(world.step()) == {"a": 5, "b": 5, "c": 5, "d": 1}
    assert world.counts(world.step()) == {"a": 2, "b": 2, "c": 2, "d": 5}
    world.finish()


def test_more_sequences_than_budget():
    world = World(max_num_batched_tokens=3)
    for i in range(8):
        world.submit(f"r{i}", prompt_of(2, 10 * (i % 5)), max_tokens=5)
    world.finish()
    assert max(plan.num_tokens for plan in world.runner.plans) == 3


def test_without_chunked_prefill_prompts_run_whole():
    world = World(max_num_batched_tokens=16, chunked_prefill=False)
    world.submit("a", prompt_of(10))
    world.submit("b", prompt_of(10, 20))
    world.submit("c", prompt_of(3, 30))
    assert world.counts(world.step()) == {"a": 10}  # 6 tokens are left, b is not split and c does not pass it
    assert world.counts(world.step()) == {"a": 1, "b": 10, "c": 3}
    world.finish()


def test_rows_limit_admission_and_are_used_again():
    world = World(max_num_seqs=2)
    for i in range(5):
        world.submit(f"r{i}", prompt_of(3, 10 * i), max_tokens=2)
    world.step()
    assert (world.running, world.waiting) == (["r0", "r1"], ["r2", "r3", "r4"])
    assert world.scheduler.num_waiting == 3
    world.finish()


def test_a_request_that_does_not_fit_yet_is_not_overtaken():
    world = World(num_pages=6)
    world.submit("a", prompt_of(10), max_tokens=6)
    world.submit("big", prompt_of(12, 20))
    world.submit("small", prompt_of(2, 30))
    world.step()
    assert (world.running, world.waiting) == (["a"], ["big", "small"])  # big needs 4 pages for its prompt and one token, 3 are left
    world.finish()
    assert world.scheduler.stats.num_preemptions == 0


def test_plans_and_results_alternate():
    world = World()
    assert world.scheduler.plan() is None and world.step() is None
    world.submit("a", prompt_of(3))
    plan = world.scheduler.plan()
    with pytest.raises(AssertionError, match="neither applied nor discarded"):
        world.scheduler.plan()
    with pytest.raises(AssertionError, match="without its plan"):
        world.scheduler.apply(StepResult(plan.step + 1, [[5]], {}, {}))
    world.scheduler.discard()
    with pytest.raises(AssertionError, match="without its plan"):
        world.scheduler.apply(StepResult(plan.step, [[5]], {}, {}))
    world.finish()


def test_a_request_that_can_never_fit_is_no_input():
    world = World(num_pages=2)
    with pytest.raises(ValueError):
        world.submit("a", prompt_of(9))
    with pytest.raises(AssertionError, match="never fit"):
        world.submit("b", prompt_of(2))
        world.scheduler.add("c", prompt_of(7), world.requests["b"][1])


def test_statistics():
    world = World()
    world.submit("a", prompt_of(9), max_tokens=3)
    world.finish()
    world.submit("b", prompt_of(9), max_tokens=2)
    world.finish()
    stats = world.scheduler.stats
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generated_tokens) == (5, 18, 5)
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens, stats.num_preemptions) == (18, 8, 0)


# Prefix cache


def test_a_prefix_hit_leaves_one_token():
    world = World()
    for name in ("a", "b"):
        world.submit(name, prompt_of(8), max_tokens=2)
        world.finish()
    assert world.runner.plans[2].starts == [4]  # two pages are cached, but then nothing would be left to compute
    assert [world.stories[name, 0].num_cached_tokens for name in ("a", "b")] == [0, 0]  # as check_stories leaves them


def test_cached_tokens_are_reported_with_the_first_token():
    world = World()
    world.submit("a", prompt_of(10), max_tokens=2)
    world.finish()
    world.submit("b", prompt_of(10), max_tokens=2)
    world.step()
    assert world.stories["b", 0].num_cached_tokens == 8
    world.finish()


def test_generated_tokens_are_found_too():
    world = World()
    world.submit("a", prompt_of(6), max_tokens=8)
    world.finish()
    whole = prompt_of(6) + world.tokens("a")
    world.submit("b", [*whole, 9], max_tokens=2)
    plan = world.step()
    # The last generated token was never computed, so 13 of the 14 are in the cache, 12 of them in whole pages.
    assert plan.starts == [12]
    world.finish()


def test_salts_do_not_share():
    world = World()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        world.submit(name, prompt_of(10), cache_salt=salt, max_tokens=1)
        world.finish()
    assert [plan.starts for plan in world.runner.plans] == [[0], [0], [8]]


def test_without_prefix_caching_all_is_computed():
    world = World(prefix_caching=False)
    for name in ("a", "b"):
        world.submit(name, prompt_of(10), max_tokens=1)
        world.finish()
    assert [plan.starts for plan in world.runner.plans] == [[0], [0]]


# Preemption


def test_the_newest_is_preempted_and_goes_to_the_front():
    world = World(num_pages=6)
    for name, first in (("a", 10), ("b", 20), ("c", 30)):
        world.submit(name, prompt_of(4, first), max_tokens=12)  # 2 pages each at first, 4 in the end
    world.step()
    assert world.running == ["a", "b", "c"]
    world.submit("d", prompt_of(4, 40), max_tokens=2)
    while len(world.running) == 3:
        world.step()
    assert (world.running, world.waiting) == (["a", "b"], ["c", "d"])
    assert world.scheduler.stats.num_preemptions == 1
    world.finish()


def test_a_preempted_sequence_comes_back_through_the_prefix_cache():
    world = World(num_pages=7)
    world.submit("a", prompt_of(4), max_tokens=12)
    world.submit("b", prompt_of(10, 30), max_tokens=12)
    world.step_until_preempted("b")
    known = 10 + len(world.tokens("b"))
    while "b" not in world.running:
        assert world.step() is not None
    plan = world.runner.plans[-1]
    fill = plan.fills[0]
    assert len(fill.tokens) == 4 * known  # the runner is told what was generated before
    assert 0 < plan.starts[plan.rows.index(fill.row)] < known
    world.finish()
    assert world.scheduler.stats.num_preemptions == 1


def test_a_victim_may_be_scheduled_already():
    world = World(num_pages=10, max_num_batched_tokens=16, max_chunk_tokens=8)
    world.submit("long", prompt_of(36))
    world.submit("short", prompt_of(4, 50), max_tokens=20)
    for _ in range(4):
        world.step()
    assert world.counts(world.runner.plans[-1]) == {"long": 8, "short": 1}
    assert world.pages.num_available == 0
    # "short" is put into the step as decode; then the older "long" needs a page for its last chunk.
    assert world.counts(world.step()) == {"long": 4}
    assert world.waiting == ["short"]
    world.finish()


def test_the_newest_may_be_the_one_that_grows():
    world = World(num_pages=4)
    world.submit("a", prompt_of(7), max_tokens=9)
    world.submit("b", prompt_of(3, 30), max_tokens=5)
    world.step()
    world.step()
    assert world.running == ["a", "b"] and world.pages.num_available == 1
    plan = world.step()  # a has 9 tokens and gets the last page; b has 5 and would need one too
    assert world.counts(plan) == {"a": 1} and world.waiting == ["b"]
    world.finish()


def test_nobody_is_admitted_in_a_step_that_preempts():
    world = World(num_pages=6)
    for name, first in (("a", 10), ("b", 20), ("c", 30)):
        world.submit(name, prompt_of(4, first), max_tokens=12)
    before = 0
    while world.scheduler.has_work:
        plan = world.step()
        if world.scheduler.stats.num_preemptions > before:
            assert not plan.fills
        before = world.scheduler.stats.num_preemptions
    assert before
    world.finish()


@pytest.mark.parametrize("chunked", [True, False])
def test_nobody_starves(chunked):
    world = World(num_pages=12, max_num_batched_tokens=48, chunked_prefill=chunked)
    world.submit("old", prompt_of(20), max_tokens=20)
    num_steps = 0
    for i in range(40):
        world.submit(f"r{i}", prompt_of(3 + i % 20, i), max_tokens=1 + i % 24)
        if world.stories["old", 0].finish_reason is None:
            num_steps += 1
            assert "old" not in world.waiting or num_steps == 1
        world.step()
    assert num_steps == 20  # the oldest runs in every step, whatever comes
    world.finish()
    assert world.scheduler.stats.num_preemptions > 10


def test_one_sequence_may_take_every_page():
    world = World(num_pages=5)
    world.submit("b", prompt_of(2, 30), max_tokens=3)
    world.submit("a", prompt_of(12), max_tokens=8)
    world.submit("c", prompt_of(12, 20), max_tokens=0)
    world.finish()
    assert len(world.tokens("a")) == 8


# Drafts


def test_drafts_take_room_but_preempt_nobody():
    """Two sequences in five pages of four tokens: pages that drafts alone would need are not taken from the other."""
    world = World(num_pages=5, num_drafts=3)
    world.submit("a", prompt_of(6), max_tokens=5)
    world.submit("b", prompt_of(6, 30), max_tokens=5)
    world.finish()
    assert world.scheduler.stats.num_preemptions > 0, "both need three pages in the end"
    lens = [plan.query_len for plan in world.runner.plans if plan.num_decode]
    assert {1, 4} <= set(lens)
    roomy = World(num_pages=6, num_drafts=3)
    roomy.submit("a", prompt_of(6), max_tokens=5)
    roomy.submit("b", prompt_of(6, 30), max_tokens=5)
    roomy.finish()
    assert roomy.scheduler.stats.num_preemptions == 0


ROOMS = [(64, None, 3), (10, None, 2), (64, 6, 1), (64, 5, 0)]


@pytest.mark.parametrize(("max_num_batched_tokens", "max_verified_tokens", "num_drafts"), ROOMS)
def test_all_verify_as_many_drafts_as_fit_the_step(max_num_batched_tokens, max_verified_tokens, num_drafts):
    world = World(num_drafts=3, max_num_batched_tokens=max_num_batched_tokens)
    world.scheduler.config = dataclasses.replace(world.scheduler.config, max_verified_tokens=max_verified_tokens)
    for i in range(3):
        world.submit(f"r{i}", prompt_of(2, 10 * i), max_tokens=30)
    world.step()
    plan = world.step()
    assert (plan.num_decode, plan.query_len, plan.num_drafts, plan.counts) == (3, 1 + num_drafts, num_drafts, [1 + num_drafts] * 3)
    world.finish()


def test_decode_and_chunks_share_a_step_with_drafts():
    world = World(num_drafts=2, max_num_batched_tokens=8)
    world.submit("a", prompt_of(2), max_tokens=12)
    world.step()
    world.submit("long", prompt_of(14, 20), max_tokens=3)
    plan = world.step()
    assert (plan.num_decode, plan.query_len, plan.counts, plan.draws, plan.num_drafts) == (1, 3, [3, 5], [0], 2)
    world.finish()


def test_counts_of_drafts_add_up():
    world = World(num_drafts=3)
    for i in range(4):
        world.submit(f"r{i}", prompt_of(3, 10 * i), max_tokens=40, ignore_eos=True)
    world.finish()
    stats = world.scheduler.stats
    assert stats.num_generated_tokens == 160
    assert stats.num_accepted_tokens == sum(stats.num_accepted_by_position) == 160 - 4 - stats.num_drafts
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens <= 3 * stats.num_drafts
    assert stats.num_accepted_by_position == sorted(stats.num_accepted_by_position, reverse=True)
