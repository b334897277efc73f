"""One MTP module (DeepSeek-V3, arXiv 2412.19437, section 2.2): a hidden state and the next token say which token comes after that.

    eh_proj([enorm(embedding of token i + 1), hnorm(hidden i)]) -> decoder block -> norm -> the main model's head: token i + 2

Its own output can take the place of the main model's hidden state, so that one module drafts any number of tokens.
"""

from typing import Any, Protocol

import torch

from hw.api import ExpertStep, Ops
from hw.weights import Storage, Weight


class Block(Protocol):
    """A decoder layer, as the main model has them."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: Any, cache: torch.Tensor, step: ExpertStep, lens: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x `[num_tokens, hidden]` -> output and residual, whose sum is the layer's output."""

    def write(self, x: torch.Tensor, meta: Any, cache: torch.Tensor, lens: list[int]) -> None:
        """Only what `forward`, with no residual, leaves in the cache."""

    def weights(self) -> list[Weight]:
        """Everything it holds."""


class DraftHead:
    """Norms and projection around a decoder block that the caller hands in. Embedding and head are the main model's."""

    def __init__(self, block: Block, ops: Ops, *, prefix: str, storage: Storage, hidden_size: int, eps: float):
        self.block, self.ops, self.prefix, self.eps = block, ops, prefix, eps
        self.enorm = storage.dense(hidden_size)
        self.hnorm = storage.dense(hidden_size)
        self.norm = storage.dense(hidden_size)
        self.eh_proj = storage.dense(hidden_size, 2 * hidden_size)  # never stored in FP8

    def weights(self) -> list[Weight]:
        """Checkpoint tensors by their hub names; the copies of embedding and head that a checkpoint has beside them are not read."""
        shape = tuple(self.norm.shape)
        return [
            Weight(name=f"{self.prefix}.enorm.weight", shape=shape, target=self.enorm, kind="norm"),
            Weight(name=f"{self.prefix}.hnorm.weight", shape=shape, target=self.hnorm, kind="norm"),
            Weight(name=f"{self.prefix}.shared_head.norm.weight", shape=shape, target=self.norm, kind="norm"),
            Weight(name=f"{self.prefix}.eh_proj.weight", shape=tuple(self.eh_proj.shape), target=self.eh_proj),
            *self.block.weights(),
        ]

    def forward(self, joined: torch.Tensor, meta: Any, cache: torch.Tensor, step: ExpertStep, lens: list[int]) -> torch.Tensor:
        """joined `[lens[tp rank], hidden]`: what `join` made of next token and state at each position -> the same shape, after the module's
        norm. `meta` is that of the positions of the states; the block's latents go to their slots of `cache`.
        """
        x, residual = self.block.forward(joined, None, meta, cache, step, lens)
        normed, _ = self.ops.add_rms_norm(x, residual, self.norm, self.eps)
        return normed.rows(quantized=False)

    def write(self, joined: torch.Tensor, meta: Any, cache: torch.Tensor, lens: list[int]) -> None:
        """Only what `forward` leaves in the cache."""
        self.block.write(joined, meta, cache, lens)

    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """embedded, hidden `[T, hidden]`: next token and state -> what the block takes, `[T, hidden]`."""
        pair = torch.cat((self.ops.rms_norm(embedded, self.enorm, self.eps), self.ops.rms_norm(hidden, self.hnorm, self.eps)), dim=-1)
        return self.ops.linear(pair, self.eh_proj)
