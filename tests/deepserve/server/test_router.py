"""The router by itself: load, cached prefixes, level ranks."""

from dataclasses import dataclass, field

from deepserve.server.router import RUN_TOKENS, SLACK_SEQUENCES, Prompt, Router

SHORT = Prompt.of([1, 2, 3])


@dataclass(eq=False)
class Rank:
    num_sequences: int = 0
    num_queued_tokens: int = 0
    num_free_tokens: int = 1 << 16
    num_cache_tokens: int = 1 << 16
    prompts: list[list[int]] = field(default_factory=list)


def prompt(topic: int, num_runs: int, tail: int = 0, *, cache_salt: str = "") -> Prompt:
    return Prompt.of([topic] * (num_runs * RUN_TOKENS) + [tail], cache_salt)


def send(router: Router, ranks: list[Rank], prompt: Prompt) -> Rank:
    chosen = router.pick(ranks, prompt)
    router.remember(chosen, prompt)
    return chosen


def test_nobody_to_pick():
    assert Router().pick([], SHORT) is None


def test_takes_the_least_loaded():
    ranks = [Rank(3), Rank(1), Rank(2)]
    router = Router()
    assert [router.pick(ranks, SHORT) for _ in range(3)] == [ranks[1]] * 3


def test_equals_take_turns():
    ranks = [Rank(1), Rank(1), Rank(5), Rank(1)]
    router = Router()
    picks = [ranks.index(router.pick(ranks, SHORT)) for _ in range(6)]
    assert sorted(picks) == [0, 0, 1, 1, 3, 3] and picks[:3] == picks[3:]


def test_queued_prompts_count():
    ranks = [Rank(1, num_queued_tokens=5000), Rank(2)]
    assert Router().pick(ranks, SHORT) is ranks[1]


def test_a_known_prefix_draws_its_followers():
    ranks = [Rank(), Rank(), Rank()]
    router = Router()
    home = send(router, ranks, prompt(7, 4))
    home.num_sequences = 2  # costs 64 tokens, saves 1,024
    assert all(send(router, ranks, prompt(7, 4, tail)) is home for tail in range(5))
    assert send(router, ranks, prompt(8, 4)) is not home, "another prompt has nothing there"
    assert send(router, ranks, prompt(7, 4, cache_salt="other")) is not home, "salted prompts share nothing"


def test_half_a_prefix_is_worth_half():
    ranks = [Rank(), Rank()]
    router = Router()
    home = send(router, ranks, prompt(7, 4))
    home.num_queued_tokens = 3 * RUN_TOKENS
    assert send(router, ranks, prompt(7, 4, 1)) is home
    assert send(router, ranks, Prompt.of([7] * (2 * RUN_TOKENS) + [0] + [9] * (2 * RUN_TOKENS))) is not home


def test_ranks_stay_level_whatever_is_cached():
    """Everybody asks with one prefix: no rank gets more than the slack ahead of another."""
    ranks = [Rank(), Rank(), Rank()]
    router = Router()
    for tail in range(60):
        chosen = send(router, ranks, prompt(7, 8, tail))
        chosen.num_sequences += 1
        counts = [rank.num_sequences for rank in ranks]
        assert max(counts) - min(counts) <= max(SLACK_SEQUENCES, 0.25 * min(counts)) + 1
    assert min(counts) > 10


def test_a_full_rank_is_the_last_choice():
    ranks = [Rank(0, num_free_tokens=10), Rank(3)]
    assert Router().pick(ranks, prompt(7, 1)) is ranks[1]


def test_memory_of_prefixes_is_bounded_and_drops_tails_first():
    ranks = [Rank(num_cache_tokens=4 * RUN_TOKENS), Rank(num_cache_tokens=4 * RUN_TOKENS)]
    router = Router()
    for topic in range(40):
        send(router, ranks, prompt(topic, 4))
    assert all(len(known) <= 4 for known in router._prefixes.values())
    home = send(router, ranks, prompt(99, 4))
    router.remember(home, Prompt(RUN_TOKENS, (123,)))  # pushes one run out
    home.num_queued_tokens = 2 * RUN_TOKENS
    assert send(router, ranks, prompt(99, 3)) is home, "the head of the prefix is still known"


def test_a_rank_that_left_is_forgotten():
    router = Router()
    send(router, [Rank(), Rank()], prompt(7, 1))
    assert len(router._prefixes) == 0


def test_where_ranks_need_not_be_level_the_cache_decides():
    ranks = [Rank(), Rank()]
    router = Router()
    home = send(router, ranks, prompt(7, 8))
    home.num_sequences = SLACK_SEQUENCES + 1
    assert router.pick(ranks, prompt(7, 8)) is not home
    assert router.pick(ranks, prompt(7, 8), level=False) is home
    assert (router.num_fresh(home, prompt(7, 8)), router.num_fresh(home, prompt(7, 4, 1))) == (1, 1)
