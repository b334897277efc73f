"""What attention must know about a step's tokens. Passed to every layer; there is no ambient context.

A step's tokens are laid out as

    | decode sequence 0 | decode sequence 1 | ... | prefill chunk 0 | prefill chunk 1 | ... |
      query_len tokens    query_len tokens          any number        any number

Lengths are on the device and, as lists or upper bounds, on the host: some backends' kernels need the one, some the other.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from hw.api import Segments


@dataclass(frozen=True)
class DecodeMeta:
    """Sequences that all bring the same small number of tokens: decode, or verification of drafts."""

    num_seqs: int
    query_len: int
    seq_lens: torch.Tensor  # [num_seqs] int32, cached tokens with this step's
    max_seq_len: int  # host upper bound of seq_lens
    page_table: torch.Tensor  # [num_seqs, max_pages] int32, -1 = unused
    plan: Any = None  # what the layers of this step share (`Ops.decode_plan`)

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.query_len


@dataclass(frozen=True)
class PrefillMeta:
    """Chunks of prompts: `queries.lens[i]` new tokens of sequence i behind `context_lens[i]` cached ones."""

    queries: Segments
    context_lens: list[int]
    seq_lens: torch.Tensor  # [num_seqs] int32, context and chunk together
    page_table: torch.Tensor  # [num_seqs, max_pages] int32, -1 = unused


@dataclass(frozen=True)
class AttnMetadata:
    """One step."""

    positions: torch.Tensor  # [num_tokens] int64
    slots: torch.Tensor  # [num_tokens] int64, where each token's latent is written; -1 = nowhere
    decode: DecodeMeta | None
    prefill: PrefillMeta | None

    def planned(self, plan: Any) -> "AttnMetadata":
        """The same step with a plan for its layers to share."""
        return self if self.decode is None else replace(self, decode=replace(self.decode, plan=plan))
