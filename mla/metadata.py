"""What attention must know about a step's tokens. Passed to every layer; there is no ambient context.

A step's tokens are laid out as

    | decode sequence 0 | decode sequence 1 | ... | prefill chunk 0 | prefill chunk 1 | ... |
      query_len tokens    query_len tokens          any number        any number

Lengths are on the device and, as lists or upper bounds, on the host: some backends' kernels need the one, some the other.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
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

    @cached_property
    def known(self) -> Segments:
        """Context and chunk of each sequence, for all layers of a step."""
        lens = [context + own for context, own in zip(self.context_lens, self.queries.lens, strict=True)]
        return Segments(lens, torch.nn.functional.pad(self.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)))

    def part(self, low: int, high: int) -> "PrefillMeta":
        """Tokens `low .. high`, at least one. What is cut off the begin of a chunk is cached context of the rest."""
        ends = list(accumulate(self.queries.lens))
        begins = [0, *ends]
        first = next(i for i, end in enumerate(ends) if end > low)
        last = next(i for i, end in enumerate(ends) if end >= high)
        some = slice(first, last + 1)
        lens = [min(ends[i], high) - max(begins[i], low) for i in range(first, last + 1)]
        context_lens = [self.context_lens[i] + max(0, low - begins[i]) for i in range(first, last + 1)]
        seq_lens = self.seq_lens[some]
        if ends[last] > high:
            seq_lens = torch.cat((seq_lens[:-1], seq_lens[-1:] - (ends[last] - high)))
        starts = (self.queries.starts[first : last + 2] - low).clamp(0, high - low)
        return PrefillMeta(Segments(lens, starts), context_lens, seq_lens, self.page_table[some])


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

    def middle(self) -> int:
        """A token before which this step can be cut into `part`s of about the same size."""
        total, num_decode = self.positions.shape[0], 0 if self.decode is None else self.decode.num_tokens
        edges = [0, total] if self.decode is None else list(range(0, num_decode + 1, self.decode.query_len))
        if self.prefill is not None:
            edges += accumulate(self.prefill.queries.lens, initial=num_decode)
        middle = (total + 1) // 2
        nearest = min(edges, key=lambda edge: abs(edge - middle))
        # A chunk that is cut attends to its first piece as to a cached prefix, which is not free; so parts may be a little uneven.
        return nearest if middle < num_decode or 8 * abs(nearest - middle) <= total else middle

    def part(self, low: int, high: int) -> "AttnMetadata":
        """Tokens `low .. high`. In each layer a part's attention must come after that of the part before it, which may have cached tokens
        for it.
        """
        decode, prefill, num_decode = None, None, 0
        if self.decode is not None:
            d, num_decode = self.decode, self.decode.num_tokens
            some = slice(*(min(token, num_decode) // d.query_len for token in (low, high)))
            if num_seqs := some.stop - some.start:
                decode = replace(d, num_seqs=num_seqs, seq_lens=d.seq_lens[some], page_table=d.page_table[some])
        if self.prefill is not None and high > max(low, num_decode):
            prefill = self.prefill.part(max(0, low - num_decode), high - num_decode)
        return AttnMetadata(self.positions[low:high], self.slots[low:high], decode, prefill)
