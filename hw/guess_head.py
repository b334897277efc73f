"""A head to guess tokens with: what it says of a draft need not be exact, since the main model looks at every draft."""

from typing import Protocol

import torch


class GuessHead(Protocol):
    """Stands for a head `[vocab, hidden]`, in less memory than that has."""

    def fill(self, weight: torch.Tensor) -> None:
        """Take the head's values, in place. Whenever they change."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[R, hidden]` -> nearly its products with the head's rows, `[R, vocab]` fp32."""
