"""Thousands of random submits, aborts, lost steps and, from a small page pool, preemptions. The runner is a fake that checks every plan.

Every request that is not aborted must come to the tokens it has alone; `World` audits after each verb.
"""

import random

import pytest

from tests.deepserve.engine.fake_runner import VOCAB_SIZE, pseudo_random_token
from tests.deepserve.engine.world import World

SETTINGS = {
    "few pages": {"num_pages": 12, "max_num_batched_tokens": 24},
    "few pages, no prefix cache": {"num_pages": 12, "max_num_batched_tokens": 24, "prefix_caching": False},
    "budget below the rows": {"num_pages": 20, "max_num_batched_tokens": 5},
    "short chunks": {"num_pages": 16, "max_num_batched_tokens": 16, "max_chunk_tokens": 3},
    "whole prompts": {"num_pages": 12, "max_num_batched_tokens": 48, "chunked_prefill": False},
    "one row": {"num_pages": 8, "max_num_batched_tokens": 8, "max_num_seqs": 1},
    "pages of one token": {"num_pages": 40, "page_size": 1, "max_num_batched_tokens": 16},
}


def sometimes_end(tokens, params, sequence_idx):
    """The fake draw, with an end token now and then."""
    token = pseudo_random_token(tokens, params, sequence_idx)
    return 1 if token % 13 == 0 else token


def random_request(rng: random.Random, world: World) -> tuple[list[int], dict]:
    """Prompts share long prefixes; anything up to the whole pool may be asked for."""
    most = world.limits.max_seq_tokens
    length = rng.randrange(1, most // 2)
    prompt = [10 + i % 7 for i in range(length)]
    for _ in range(rng.randrange(3)):
        prompt[rng.randrange(length)] = rng.randrange(VOCAB_SIZE)
    max_tokens = rng.choice([0, 1, 2, rng.randrange(most - length)])
    params = {
        "max_tokens": max_tokens,
        "min_tokens": rng.randrange(max_tokens + 1),
        "n": rng.choice([1, 1, 1, 2, 4]),
        "prompt_logprobs": rng.choice([None, None, 1]),
        "logprobs": rng.choice([None, 0]),
        "stop_token_ids": rng.choice([[], [5, 20]]),
        "ignore_eos": rng.random() < 0.3,
        "seed": rng.randrange(3),
        "cache_salt": rng.choice(["", "", "other"]),
    }
    return prompt, params


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", SETTINGS)
def test_random_walk(name, asynchronous, num_drafts, seed):
    rng = random.Random(seed)
    world = World(next_token=sometimes_end, asynchronous=asynchronous, num_drafts=num_drafts, **SETTINGS[name])
    num_submitted = num_aborted = 0
    for _ in range(2000):
        verb = rng.random()
        if verb < 0.12 and world.scheduler.num_waiting < 20:
            prompt, params = random_request(rng, world)
            world.submit(f"r{num_submitted}", prompt, **params)
            num_submitted += 1
        elif verb < 0.15 and world.scheduler.has_work:
            num_aborted += world.abort(rng.choice(world.running + world.waiting))
        elif verb < 0.25:
            world.discard(ran=rng.random() < 0.5)
        else:
            world.step()
    world.finish()
    assert num_submitted > 80 and num_aborted > 10
    preempts = world.scheduler.stats.num_preemptions
    assert preempts == 0 if name == "one row" else preempts > 5
    assert sorted(world.scheduler._free_rows) == list(range(world.config.max_num_seqs))
    assert world.scheduler.num_waiting == 0 and not world.scheduler._followers
