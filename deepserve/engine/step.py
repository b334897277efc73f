"""What crosses between scheduler and runner: a plan goes in, a result comes out. No torch.

A runner keeps a table of *rows*, one for each running sequence; a plan says what changed in the table and which tokens to
compute. A plan can be discarded at any time before its result is applied: nothing the scheduler knows has advanced, and latents are
written to the same slots again.
"""

import msgspec

from deepserve.engine.request import PositionLogprobs, SamplingParams, Sequence


class RowFill(msgspec.Struct, array_like=True, frozen=True):
    """A sequence takes a row (or is told again, after a discarded plan): all that the runner must know of it."""

    row: int
    sequence_idx: int  # which of the request's n sequences; keys the sampling noise
    num_prompt: int
    tokens: bytes  # int32, prompt and what was generated before a preemption
    pages: list[int]
    params: SamplingParams
    end_token_ids: tuple[int, ...]  # kept from being drawn before min_tokens

    @classmethod
    def of(cls, sequence: Sequence) -> "RowFill":
        """A running sequence, with all of its tokens and pages."""
        assert sequence.row is not None
        return cls(
            row=sequence.row,
            sequence_idx=sequence.index,
            num_prompt=sequence.num_prompt,
            tokens=sequence.tokens.tobytes(),
            pages=list(sequence.pages),
            params=sequence.params,
            end_token_ids=tuple(sorted(sequence.end_token_ids)),
        )


class StepPlan(msgspec.Struct, array_like=True, frozen=True):
    """One forward pass. Entry i computes tokens `starts[i] .. starts[i] + counts[i]` of the sequence in `rows[i]`.

    The first `num_decode` entries decode: each computes its latest token and the `query_len - 1` drafts behind it, and draws behind every
    one of these. Only the device knows for sure where they start, since earlier steps in flight may accept fewer drafts than they verify;
    their `starts` are the most that can be. The rest are prefill chunks.
    """

    step: int
    fills: list[RowFill]
    # Pages that rows gained since they were filled: page `page_ids[j]` stands at `page_idxs[j]` of row `page_rows[j]`.
    page_rows: list[int]
    page_idxs: list[int]
    page_ids: list[int]
    rows: list[int]
    starts: list[int]
    counts: list[int]
    num_decode: int
    query_len: int
    num_drafts: int  # to make behind each draw, for the next step; 0: the MTP module only writes its latents of prompts
    draws: list[int]  # entries that end at their sequence's last known token and draw: all decode entries, and last chunks of prompts
    prompt_logprobs: list[int]  # entries whose prompt positions want log-probabilities

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """What a plan produced."""

    step: int
    tokens: list[list[int]]  # for each of `plan.draws`: one, and one more for each accepted draft
    logprobs: dict[int, list[PositionLogprobs]]  # by entry, where asked for: one for each of its tokens
    # By entry: positions `start + 1 .. start + count`, as far as they are prompt.
    prompt_logprobs: dict[int, list[PositionLogprobs]]


def new_pages(sequences: list[Sequence]) -> tuple[list[int], list[int], list[int]]:
    """Rows, places and ids of the pages that the runner has not been told of, and is told now."""
    rows: list[int] = []
    idxs: list[int] = []
    ids: list[int] = []
    for sequence in sequences:
        num_pages = len(sequence.pages)
        if num_pages > sequence.num_sent_pages:
            new = range(sequence.num_sent_pages, num_pages)
            rows += [sequence.row] * len(new)
            idxs += new
            ids += sequence.pages[new.start :]
            sequence.num_sent_pages = num_pages
    return rows, idxs, ids
