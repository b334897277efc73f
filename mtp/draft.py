"""Drafting: one MTP module applied again and again, each time to its own output."""

from collections.abc import Callable, Iterator

import torch


def propose(
    hidden: torch.Tensor,
    num_drafts: int,
    advance: Callable[[torch.Tensor, int], torch.Tensor],
    best: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[torch.Tensor]:
    """The `num_drafts` most likely next tokens, one after the other, `[R]` int64 each.

    hidden `[R, hidden]`: of each sequence, where its latest token was drawn. advance: hidden and how many passes there were -> the module's
    output one position on; it pairs hidden with the token drawn, then with each draft. best: hidden -> tokens `[R]`.
    """
    for num_passes in range(num_drafts):
        hidden = advance(hidden, num_passes)
        yield best(hidden)
