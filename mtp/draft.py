"""Drafting: one MTP module applied again and again, each time to its own output."""

from collections.abc import Callable

import torch


def propose(
    hidden: torch.Tensor,
    num_drafts: int,
    best: Callable[[torch.Tensor], torch.Tensor],
    advance: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """The `num_drafts` most likely next tokens, one after the other: `[R, num_drafts]` int64.

    hidden `[R, hidden]`: the module's output behind each sequence's latest token. best: hidden -> tokens `[R]`. advance: tokens, the hidden
    they came from and how many passes there were -> the module's output one position on.
    """
    drafts = []
    for num_passes in range(num_drafts):
        drafts.append(best(hidden))
        if num_passes + 1 < num_drafts:
            hidden = advance(drafts[-1], hidden, num_passes)
    return torch.stack(drafts, dim=1)
