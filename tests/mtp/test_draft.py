"""Drafting: which state and token each pass sees."""

import torch

from mtp.draft import propose


def test_each_pass_goes_on_from_the_output_of_the_one_before():
    seen = []

    def advance(hidden: torch.Tensor, num_passes: int) -> torch.Tensor:
        seen.append((hidden[:, 0].tolist(), num_passes))
        return hidden + 1

    def best(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, 0].long() * 10

    drafts = [tokens.tolist() for tokens in propose(torch.tensor([[1.0], [5.0]]), 3, advance, best)]
    assert drafts == [[20, 60], [30, 70], [40, 80]]
    assert seen == [([1.0, 5.0], 0), ([2.0, 6.0], 1), ([3.0, 7.0], 2)], "the last draft needs no further pass"
