"""Drafting: which state and token each pass sees."""

import torch

from mtp.draft import propose


def test_each_pass_goes_on_from_the_output_of_the_one_before():
    seen = []

    def best(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, 0].long() * 10

    def advance(drafts: torch.Tensor, hidden: torch.Tensor, num_passes: int) -> torch.Tensor:
        seen.append((drafts.tolist(), hidden[:, 0].tolist(), num_passes))
        return hidden + 1

    drafts = propose(torch.tensor([[1.0], [5.0]]), 3, best, advance)
    assert drafts.tolist() == [[10, 20, 30], [50, 60, 70]]
    assert seen == [([10, 50], [1.0, 5.0], 0), ([20, 60], [2.0, 6.0], 1)], "the last draft needs no further pass"
