"""The steps before the first request leave nothing behind."""

import pytest
import torch

from deepserve.engine.rehearsal import rehearse
from tests.deepserve.engine.driving import Request, make_engine, minimal_folder, run_together


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 7}, {"max_model_len": 40}, {"max_dispatch_tokens_per_rank": 1}], ids=str)
def test_nothing_is_left_behind(tmp_path, limits: dict):
    engine = make_engine(model=minimal_folder(tmp_path), load_format="dummy", num_pages=12, **limits)
    requests = [Request([3 + i] * (5 + 6 * i), {"max_tokens": 4, "temperature": 1.0, "seed": i, "ignore_eos": True}) for i in range(3)]
    expected = run_together(engine, requests)
    for cache in engine.runner.caches:
        cache.normal_()
    before = [cache.clone() for cache in engine.runner.caches]
    forward, sizes = engine.runner.model.forward, []

    def counting(token_ids, *args):
        sizes.append(len(token_ids))
        return forward(token_ids, *args)

    engine.runner.model.forward = counting
    args, most = engine.config.args, engine.config.max_model_len
    cap = args.max_dispatch_tokens_per_rank
    rehearse(engine.runner.model, engine.backend, engine.runner.caches, max_tokens=args.max_num_batched_tokens, max_model_len=most, cap=cap)
    assert sizes and max(sizes) <= min(args.max_num_batched_tokens, most)
    for cache, old in zip(engine.runner.caches, before, strict=True):
        assert torch.equal(cache, old)
    engine.pages.forget_cached()
    assert run_together(engine, requests) == expected
