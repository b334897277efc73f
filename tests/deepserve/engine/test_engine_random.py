"""Thousands of random submits, aborts, lost steps and preemptions on a real engine with a minimal random model."""

import random

import pytest

from tests.deepserve.engine.driving import Driver, Request, make_engine, minimal_folder, run_together


def random_request(rng: random.Random, room: int) -> Request:
    length = rng.choice([rng.randrange(1, 12), rng.randrange(1, 150)])
    prompt = [3 + i % 50 for i in range(length)]
    prompt[rng.randrange(length)] = rng.randrange(64)
    max_tokens = rng.choice([0, 1, rng.randrange(12), rng.randrange(160)])
    params = {
        "max_tokens": min(max_tokens, room - length),
        "n": rng.choice([1, 1, 1, 3]),
        "temperature": rng.choice([0.0, 1.0]),
        "top_k": rng.choice([0, 5]),
        "top_p": rng.choice([1.0, 0.9]),
        "frequency_penalty": rng.choice([0.0, 1.0]),
        "logit_bias": rng.choice([None, {7: 2.0}]),
        "logprobs": rng.choice([None, 1]),
        "prompt_logprobs": rng.choice([None, None, 1]),
        "min_tokens": 0,
        "stop_token_ids": rng.choice([[], [5, 20, 33]]),
        "seed": rng.randrange(100),
    }
    return Request(prompt, params)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_random_walk(tmp_path, seed, batch_invariant):
    rng = random.Random(seed)
    args = {"model": minimal_folder(tmp_path), "load_format": "dummy", "batch_invariant": batch_invariant}
    engine = make_engine(**args, num_pages=9, max_model_len=320, max_num_seqs=6, max_num_batched_tokens=96)
    driver = Driver(engine)
    requests: dict[str, Request] = {}
    num_aborted = num_submitted = 0
    for _ in range(2000):
        verb = rng.random()
        scheduler = engine.scheduler
        if verb < 0.2 and scheduler.num_waiting < 10:
            request_id = f"r{num_submitted}"
            requests[request_id] = random_request(rng, 320)
            driver.submit(request_id, requests[request_id])
            num_submitted += 1
        elif verb < 0.25 and engine.has_work:
            victim = rng.choice([*scheduler.running, *scheduler.waiting]).request_id
            assert engine.knows(victim)
            engine.abort([victim, "nobody"])
            assert not engine.knows(victim)
            del requests[victim]
            num_aborted += 1
        elif verb < 0.33:
            driver.discard()
        elif verb < 0.43 and len(scheduler.running) > 1:
            scheduler._preempt(scheduler.running[-1])
        else:
            driver.step()
        scheduler.check()
    driver.finish()
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_held_pages) == (0, 0, 0)
    assert num_submitted > 150 and num_aborted > 50 and load.num_preemptions > 40
    finished = {request_id: request for request_id, request in requests.items() if request.params["max_tokens"]}
    assert len(finished) > 60 and all(driver.stories[request_id, 0].finish_reason for request_id in finished)
    if batch_invariant:
        # What came through all that is what a calm engine gives.
        sample = rng.sample(sorted(finished), 40)
        fresh = make_engine(**args)
        wanted = run_together(fresh, [Request(finished[name].prompt, {**finished[name].params, "n": 1}) for name in sample])
        for name, story in zip(sample, wanted, strict=True):
            found = driver.stories[name, 0]
            found.num_cached_tokens = 0
            assert found == story, name
