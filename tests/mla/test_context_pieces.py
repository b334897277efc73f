"""Cutting cached prefixes into rounds that fit the workspace."""

import random

import pytest

from mla.naive import context_pieces


def test_by_hand():
    assert list(context_pieces([5, 0, 2], 6)) == [([0, 0, 0], [3, 0, 2]), ([3, 0, 2], [2, 0, 0])]
    assert list(context_pieces([0, 0], 6)) == []
    assert list(context_pieces([4], 100)) == [([0], [4])]


def test_every_prefix_token_is_in_one_round():
    for _ in range(500):
        lens = [random.choice((0, 1, random.randint(0, 50))) for _ in range(random.randint(1, 6))]
        workspace = random.randint(1, 60)
        done = [0] * len(lens)
        for first, counts in context_pieces(lens, workspace):
            assert len(first) == len(counts) == len(lens)
            assert 0 < sum(counts) <= max(workspace, sum(length > 0 for length in lens))
            for i, count in enumerate(counts):
                assert first[i] == done[i] and count >= 0
                done[i] += count
        assert done == lens


@pytest.mark.parametrize("workspace", [1, 8192])
def test_rounds_are_as_few_as_equal_shares_allow(workspace: int):
    lens = [10_000, 3, 0]
    share = max(1, workspace // 2)
    assert sum(1 for _ in context_pieces(lens, workspace)) == -(-10_000 // share)
