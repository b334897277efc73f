"""Which drafts the target accepts. Pure."""

import torch


def accepted_lens(draws: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """How many drafts of each sequence stand: the longest prefix that equals what the target drew itself.

    draws `[R, k + 1]` int64: the target's token at each verified position, drawn as it would be without drafts. drafts `[R, k]` int64:
    draft j was the input of position j + 1. Returns `[R]` int64 in 0..k; a sequence goes on with its first accepted + 1 draws.

    Draw j is the target's only if all inputs before it were right, so nothing behind the first difference counts. What is kept does not
    depend on the drafts: equal tokens with any drafts, or none.
    """
    stands = draws[:, :-1] == drafts
    return (stands.cumprod(1) if drafts.shape[1] > 1 else stands).sum(1)
