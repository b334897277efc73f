"""The life of a request: ends, several sequences, scoring, aborts, steps that are lost. The runner is a fake that checks every plan."""

import pytest

from deepserve.engine.request import SamplingParams
from tests.deepserve.engine.world import World


def prompt_of(length: int, first: int = 10) -> list[int]:
    return [first + i % 50 for i in range(length)]


def script(*tokens: int, num_prompt: int = 3):
    """Draws exactly these, whatever the sequence."""
    return lambda known, params, index: tokens[len(known) - num_prompt]


# Ends


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_token"),
    [
        ({"max_tokens": 4}, [5, 6, 7, 8], "length", None),
        ({"max_tokens": 8}, [5, 6, 7, 8, 9, 1], "stop", 1),
        ({"max_tokens": 6}, [5, 6, 7, 8, 9, 1], "stop", 1),
        ({"max_tokens": 8, "ignore_eos": True}, [5, 6, 7, 8, 9, 1, 5, 5], "length", None),
        ({"max_tokens": 8, "stop_token_ids": [7, 20]}, [5, 6, 7], "stop", 7),
        ({"max_tokens": 8, "stop_token_ids": [7], "ignore_eos": True}, [5, 6, 7], "stop", 7),
        ({"max_tokens": 8, "stop_token_ids": [7], "min_tokens": 3}, [5, 6, 8, 8, 9, 1], "stop", 1),
        ({"max_tokens": 8, "min_tokens": 5}, [5, 6, 7, 8, 9, 1], "stop", 1),
        ({"max_tokens": 8, "min_tokens": 6}, [5, 6, 7, 8, 9, 2, 5, 5], "length", None),
        ({"max_tokens": 1, "stop_token_ids": [5]}, [5], "stop", 5),
    ],
)
def test_ends(params, tokens, reason, stop_token):
    world = World(next_token=script(5, 6, 7, 8, 9, 1, 5, 5))
    world.submit("a", prompt_of(3), **params)
    world.finish()
    story = world.stories["a", 0]
    assert (story.tokens, story.finish_reason, story.stop_token_id) == (tokens, reason, stop_token)


def test_a_stop_token_in_the_prompt_ends_nothing():
    world = World(next_token=script(5, 6, 7, 1))
    world.submit("a", [1, 7, 1], max_tokens=4)
    world.finish()
    assert world.tokens("a") == [5, 6, 7, 1]


def test_logprobs_come_with_their_tokens():
    world = World()
    world.submit("a", prompt_of(3), logprobs=0)
    world.submit("b", prompt_of(3, 20))
    world.submit("c", prompt_of(3, 30), logprobs=2)
    world.finish()  # compares with each request alone
    assert [len(world.stories[name, 0].logprobs) for name in "abc"] == [4, 0, 4]


# Several sequences of one request


def test_followers_wait_for_the_prompt_and_find_it_in_the_cache():
    world = World(max_num_batched_tokens=8)
    world.submit("a", prompt_of(14), n=3)
    assert world.scheduler.num_waiting == 3
    assert world.counts(world.step()) == {"a": 8}
    assert world.scheduler.num_waiting == 2
    world.step()
    plan = world.step()
    assert [fill.sequence_idx for fill in plan.fills] == [1, 2]
    # 12 of the 14 prompt tokens stand in whole pages.
    assert (plan.starts, plan.counts) == ([14, 12, 12], [1, 2, 2])
    assert world.scheduler.num_waiting == 0
    world.finish()
    tokens = [tuple(world.tokens("a", i)) for i in range(3)]
    assert len(set(tokens)) == 3


def test_followers_start_before_later_requests():
    world = World(max_num_batched_tokens=6)
    world.submit("a", prompt_of(6), n=3)
    world.submit("b", prompt_of(6, 30))
    world.step()
    assert (world.running, world.waiting) == (["a"], ["a", "a", "b"])
    assert [sequence.index for sequence in world.scheduler.waiting] == [1, 2, 0]
    world.finish()


def test_a_leader_that_is_preempted_keeps_its_followers_waiting():
    world = World(num_pages=8, max_num_batched_tokens=8, max_chunk_tokens=3)
    world.submit("old", prompt_of(3, 40), max_tokens=24)
    world.submit("a", prompt_of(22), n=2)
    world.step_until_preempted("a")
    assert not world.tokens("a") and world.scheduler.num_waiting == 2
    world.finish()
    assert world.tokens("a", 1)


def test_a_leader_that_ends_at_once_releases_its_followers():
    world = World()
    world.submit("a", prompt_of(6), n=4, max_tokens=1)
    world.finish()
    assert all(len(world.tokens("a", i)) == 1 for i in range(4))


# Scoring


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_no_tokens_wanted(n, prompt_logprobs):
    world = World(max_num_batched_tokens=8)
    world.submit("a", prompt_of(18), n=n, max_tokens=0, prompt_logprobs=prompt_logprobs)
    world.finish()
    assert [plan.counts for plan in world.runner.plans] == [[8], [8], [2]]
    assert not any(plan.draws for plan in world.runner.plans)
    stories = [world.stories["a", i] for i in range(n)]
    assert all(story.tokens == [] and story.finish_reason == "length" for story in stories)
    assert (stories[0].prompt_logprobs is None) == (prompt_logprobs is None)


def test_scoring_fills_the_last_page():
    world = World(num_pages=2)
    world.submit("a", prompt_of(8), max_tokens=0)
    world.finish()


@pytest.mark.parametrize("length", [1, 2, 8, 9, 17])
@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_cover_the_prompt(length, n):
    world = World(max_num_batched_tokens=8)
    world.submit("a", prompt_of(length), prompt_logprobs=2, n=n)
    world.finish()
    assert len(world.stories["a", 0].prompt_logprobs) == length
    if n == 2:
        assert world.stories["a", 1].prompt_logprobs is None


def test_prompt_logprobs_need_the_whole_prompt_computed():
    world = World()
    world.submit("a", prompt_of(10), max_tokens=2)
    world.finish()
    world.submit("b", prompt_of(10), max_tokens=2, prompt_logprobs=1)
    plan = world.step()
    assert (plan.starts, plan.prompt_logprobs) == ([0], [0])
    assert world.step().prompt_logprobs == []
    world.finish()


def test_prompt_logprobs_start_again_after_a_preemption():
    world = World(num_pages=8, max_num_batched_tokens=8, max_chunk_tokens=3)
    world.submit("old", prompt_of(3, 40), max_tokens=24)
    world.submit("a", prompt_of(22), prompt_logprobs=1)
    world.step_until_preempted("a")
    assert not world.tokens("a")  # in the middle of its prompt
    while "a" not in world.running:
        world.step()
    assert 0 in world.runner.plans[-1].starts  # its pages are in the cache, but their log-probabilities are not
    world.finish()
    assert world.scheduler.stats.num_preemptions == 1


def test_prompt_logprobs_that_are_complete_outlive_a_preemption():
    # The chunk ends one token before the prompt does: all log-probabilities are known, the first token is not.
    world = World(num_pages=6, max_chunk_tokens=8)
    world.submit("old", prompt_of(4, 40), max_tokens=20)
    for _ in range(8):
        world.step()
    world.submit("a", prompt_of(9), prompt_logprobs=1, max_tokens=2)
    world.step()
    assert world.running == ["old", "a"] and not world.tokens("a")
    a = world.scheduler.running[1]
    assert len(a.prompt_logprobs) == 9 and not a.wants_prompt_logprobs
    world.pages.reserve("someone", world.pages.num_available, deadline_s=1.0)
    world.step()
    assert world.waiting == ["a"]
    world.pages.cancel("someone")
    world.finish()


# Aborts


def waiting(world: World) -> None:
    world.submit("other", prompt_of(60, 5), max_tokens=3)
    world.submit("x", prompt_of(6))


def prefilling(world: World) -> None:
    world.submit("x", prompt_of(30))
    world.step()


def decoding(world: World) -> None:
    world.submit("other", prompt_of(3, 5), max_tokens=9)
    world.submit("x", prompt_of(6), max_tokens=9)
    world.step()
    world.step()
    assert world.tokens("x")


def leading(world: World) -> None:
    world.submit("x", prompt_of(30), n=4)
    world.step()
    assert world.scheduler.num_waiting == 3


def following(world: World) -> None:
    world.submit("x", prompt_of(6), n=4)
    world.step()
    assert world.waiting == ["x"] * 3


def never_started(world: World) -> None:
    world.submit("x", prompt_of(6), n=4)


def preempted(world: World) -> None:
    world.submit("old", prompt_of(4, 40), max_tokens=60)
    world.submit("x", prompt_of(4), max_tokens=60)
    world.step_until_preempted("x")


def planned_and_discarded(world: World) -> None:
    world.submit("x", prompt_of(6), n=2)
    world.discard()
    assert world.running == ["x"]


@pytest.mark.parametrize("situation", [waiting, prefilling, decoding, leading, following, never_started, preempted, planned_and_discarded])
def test_abort(situation):
    world = World(num_pages=18, max_num_batched_tokens=16)
    situation(world)
    assert world.abort("x")
    assert "x" not in world.running + world.waiting
    assert not world.abort("x") and not world.abort("nobody")
    world.submit("after", prompt_of(6), max_tokens=3)
    world.finish()
    assert len(world.tokens("after")) == 3
    assert world.scheduler.num_waiting == 0


def test_abort_of_the_last_request_leaves_no_work():
    world = World()
    leading(world)
    world.abort("x")
    assert not world.scheduler.has_work and world.scheduler.num_waiting == 0 and world.step() is None
    assert world.pages.num_held == 0


# Lost steps


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("times", [1, 3])
def test_a_discarded_step_is_planned_again(ran, times):
    world = World(max_num_batched_tokens=12)
    world.submit("a", prompt_of(5), max_tokens=6)
    world.submit("b", prompt_of(20, 30), max_tokens=6, prompt_logprobs=0)
    while world.scheduler.has_work:
        lost = [world.discard(ran=ran) for _ in range(times)]
        plan = world.step()
        for other in lost:
            assert other.step != plan.step, "a late result of a lost step must not pass for this one's"
            assert (other.rows, other.starts, other.counts) == (plan.rows, plan.starts, plan.counts)
            assert (other.draws, other.prompt_logprobs) == (plan.draws, plan.prompt_logprobs)
        # The runner is told of every row again, and of nothing twice.
        assert {fill.row for fill in plan.fills} >= set(plan.rows) and not plan.page_rows
    world.finish()


def test_only_the_step_after_a_discard_tells_everything_again():
    world = World()
    world.submit("a", prompt_of(5), max_tokens=9)
    world.step()
    world.discard()
    assert len(world.step().fills) == 1
    assert world.step().fills == []
    world.finish()


def test_a_discard_without_a_plan_resends_too():
    world = World()
    world.submit("a", prompt_of(5))
    world.step()
    world.scheduler.discard()  # the runner lost its table between steps
    world.runner.rows.clear()
    world.finish()


def test_a_discarded_step_that_preempted():
    world = World(num_pages=6)
    for name, first in (("a", 10), ("b", 20), ("c", 30)):
        world.submit(name, prompt_of(4, first), max_tokens=12)
    while not world.scheduler.stats.num_preemptions:
        world.discard()
        world.step()
    world.finish()


def test_an_abort_after_a_discard():
    world = World()
    world.submit("a", prompt_of(5), max_tokens=6)
    world.submit("b", prompt_of(6, 30), max_tokens=6)
    world.step()
    world.discard()
    world.abort("a")
    world.submit("c", prompt_of(7, 20), max_tokens=6)
    world.finish()


def test_params_come_from_validate():
    world = World()
    for params in (SamplingParams(max_tokens=None, seed=1), SamplingParams(max_tokens=1)):
        with pytest.raises(AssertionError, match="validate"):
            world.scheduler.add("a", [1], params)
