"""What `hw.api.Ops` draws tokens from, and what it tells of them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SampleInputs:
    """One row for each token to draw. Position-keyed noise makes a draw depend on nothing but its own row.

    The noise of a token is keyed by (seed, sequence index, position, token id) with Philox4x32-10 (Salmon et al., SC 2011).
    """

    temperature: torch.Tensor  # [R] fp32, 0 = greedy
    top_k: torch.Tensor  # [R] int64, 0 = off
    top_p: torch.Tensor  # [R] fp32, 1 = off
    min_p: torch.Tensor  # [R] fp32, 0 = off
    seed: torch.Tensor  # [R] int64
    sequence_idx: torch.Tensor  # [R] int64, which of the request's n sequences
    position: torch.Tensor  # [R] int64, index of the drawn token in its sequence
    any_sampled: bool  # host facts that save whole passes; they must be true wherever a row needs them
    any_filtered: bool


@dataclass(frozen=True)
class PenaltyInputs:
    """Rows of `logits` that carry penalties and the tokens they have seen."""

    rows: torch.Tensor  # [P] int64, rows of logits
    prompt_mask: torch.Tensor  # [P, V] bool, token stands in the prompt
    output_counts: torch.Tensor  # [P, V] fp32, times generated
    presence: torch.Tensor  # [P] fp32
    frequency: torch.Tensor  # [P] fp32
    repetition: torch.Tensor  # [P] fp32


@dataclass(frozen=True)
class Logprobs:
    """Result of `Ops.logprobs`."""

    token: torch.Tensor  # [R] fp32, natural logarithm
    rank: torch.Tensor  # [R] int64, 1 = most likely
    top_ids: torch.Tensor  # [R, num_top] int64, falling
    top: torch.Tensor  # [R, num_top] fp32
