"""Acceptance is equality, as far as everything before was equal."""

import torch

from mtp.verify import accepted_lens


def test_every_pattern_of_three_drafts():
    patterns = [[(i >> j) & 1 for j in range(3)] for i in range(8)]
    draws = torch.tensor([[5, 6, 7, 8]] * 8)
    drafts = draws[:, :3] + 1 - torch.tensor(patterns)  # equal where the pattern has a 1
    wanted = [next((j for j in range(3) if not pattern[j]), 3) for pattern in patterns]
    assert accepted_lens(draws, drafts).tolist() == wanted


def test_a_draft_is_compared_with_the_draw_at_its_own_place():
    draws = torch.tensor([[1, 2, 3]])
    assert accepted_lens(draws, torch.tensor([[2, 3]])).tolist() == [0]
    assert accepted_lens(draws, torch.tensor([[1, 3]])).tolist() == [1]


def test_nothing_to_verify():
    assert accepted_lens(torch.tensor([[4], [5]]), torch.empty(2, 0, dtype=torch.int64)).tolist() == [0, 0]
    assert accepted_lens(torch.empty(0, 3, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int64)).tolist() == []
