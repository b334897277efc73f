"""The runner's table of running sequences: one row each, kept on the host, changed by what a plan says.

Page tables, parameters and the tokens known when a row was filled stay here between steps, so that a plan carries only changes. What
has been drawn since is on the device: `deepserve.engine.state`. The scheduler numbers the rows.
"""

import numpy as np

from deepserve.engine.request import SamplingParams
from deepserve.engine.step import RowFill, StepPlan


class Rows:
    """Struct of arrays, indexed by row."""

    def __init__(self, num_rows: int, max_pages: int):
        self.page_table = np.full((num_rows, max_pages), -1, dtype=np.int32)
        self.num_pages = np.zeros(num_rows, np.int64)
        self.num_changes = 0
        self.tokens: list[np.ndarray] = [np.empty(0, np.int32)] * num_rows  # prompt, and what was generated before the row was filled
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.sequence_idx = np.zeros(num_rows, np.int64)
        self.seed = np.zeros(num_rows, np.int64)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.params: list[SamplingParams | None] = [None] * num_rows
        self.end_token_ids: list[tuple[int, ...]] = [()] * num_rows
        # Rows that need work beyond the arrays above; most batches have none.
        self.penalized: set[int] = set()
        self.biased: set[int] = set()
        self.min_length: set[int] = set()
        self.with_logprobs: set[int] = set()

    def update(self, plan: StepPlan) -> list[int]:
        """Apply a plan's changes. Returns the rows that were filled anew."""
        self.num_changes += bool(plan.fills or plan.page_rows)
        for fill in plan.fills:
            self._fill(fill)
        if plan.page_rows:
            self.page_table[plan.page_rows, plan.page_idxs] = plan.page_ids
            np.add.at(self.num_pages, plan.page_rows, 1)
        return [fill.row for fill in plan.fills]

    def _fill(self, fill: RowFill) -> None:
        row, params = fill.row, fill.params
        assert params.max_tokens is not None and params.seed is not None
        self.tokens[row] = np.frombuffer(fill.tokens, np.int32)
        self.page_table[row] = -1
        self.page_table[row, : len(fill.pages)] = fill.pages
        self.num_pages[row] = len(fill.pages)
        self.num_prompt[row] = fill.num_prompt
        self.sequence_idx[row] = fill.sequence_idx
        self.seed[row] = params.seed
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.params[row] = params
        self.end_token_ids[row] = fill.end_token_ids
        penalized = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        _set_member(self.penalized, row, bool(penalized))
        _set_member(self.biased, row, bool(params.logit_bias))
        _set_member(self.min_length, row, params.min_tokens > 0)
        _set_member(self.with_logprobs, row, params.logprobs is not None)


def _set_member(members: set[int], row: int, wanted: bool) -> None:
    if wanted:
        members.add(row)
    else:
        members.discard(row)
