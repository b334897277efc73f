"""A fake of `deepserve.engine.runner.Runner` for scheduler tests: no model, deterministic tokens and drafts, a strict reader of plans.

It keeps its own row table from fills and page deltas, and a fake cache in which each slot remembers which exact prefix its
latent stands for. Before a token is computed, every token in front of it must be found in the slots that the row's pages name: a page
that was reused too early, a wrong prefix hit or a start that skips tokens fails there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from deepserve.engine.request import PositionLogprobs, SamplingParams
from deepserve.engine.scheduler import SchedulerConfig
from deepserve.engine.step import RowFill, StepPlan, StepResult

VOCAB_SIZE = 64
EOS = 1
NextToken = Callable[[tuple[int, ...], SamplingParams, int], int]  # tokens so far, params, sequence index


def pseudo_random_token(tokens: tuple[int, ...], params: SamplingParams, sequence_idx: int) -> int:
    """Any token but the low ones, fixed by everything a real draw may depend on."""
    return 4 + hash((tokens, params.seed, sequence_idx)) % (VOCAB_SIZE - 4)


def draw(next_token: NextToken, tokens: list[int], num_prompt: int, params: SamplingParams, idx: int, ends: frozenset[int]) -> int:
    """The next token, keeping end tokens away before `min_tokens` as the sampler does."""
    token = next_token(tuple(tokens), params, idx)
    while token in ends and len(tokens) - num_prompt < params.min_tokens:
        token = (token + 1) % VOCAB_SIZE
    return token


def prompt_logprob(tokens: list[int], position: int) -> PositionLogprobs:
    """Depends on the prefix, so that a position that was mixed up is seen."""
    return PositionLogprobs([tokens[position]], [-1.0 - hash(tuple(tokens[: position + 1])) % 1000], 1)


@dataclass
class Row:
    """What the runner knows of one sequence."""

    tokens: list[int]
    pages: list[int]
    num_prompt: int
    params: SamplingParams
    sequence_idx: int
    ends: frozenset[int]

    @classmethod
    def of(cls, fill: RowFill) -> "Row":
        tokens = np.frombuffer(fill.tokens, np.int32).tolist()
        return cls(tokens, list(fill.pages), fill.num_prompt, fill.params, fill.sequence_idx, frozenset(fill.end_token_ids))

    def slot(self, position: int, page_size: int) -> int:
        return self.pages[position // page_size] * page_size + position % page_size


@dataclass
class FakeRunner:
    """Answers plans. `plans` keeps all it was asked, for tests that look at them."""

    config: SchedulerConfig
    num_pages: int
    page_size: int
    next_token: NextToken = pseudo_random_token
    rows: dict[int, Row] = field(default_factory=dict)
    cache: dict[int, int] = field(default_factory=dict)  # slot -> hash of the prefix that ends there
    plans: list[StepPlan] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)  # of each decode entry that verified drafts

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._update(plan)
        self._check_shape(plan)
        draws = [i for i, row_id in enumerate(plan.rows) if self._reaches_end(plan, i) and self.rows[row_id].params.max_tokens]
        assert plan.draws == draws, "entries that reach their last token draw, all others do not"
        tokens: list[list[int]] = []
        for i, (row_id, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            row = self.rows[row_id]
            if i < plan.num_decode:
                tokens.append(self._verify(row, start, count))
                continue
            self._compute(row, start, count)
            if i in draws:
                tokens.append([self._draw(row)])
        wanted = [i for i in plan.draws if self.rows[plan.rows[i]].params.logprobs is not None]
        of_entry = dict(zip(plan.draws, tokens, strict=True))
        logprobs = {i: [PositionLogprobs([token], [-float(token)], 1) for token in of_entry[i]] for i in wanted}
        return StepResult(plan.step, tokens, logprobs, {i: self._prompt_logprobs(plan, i) for i in plan.prompt_logprobs})

    def _verify(self, row: Row, most: int, count: int) -> list[int]:
        """The latest token and `count - 1` drafts, some of which stand. Those behind the last right one leave their mark in the cache."""
        start = len(row.tokens) - 1
        unsure = self.plans[-2].query_len - 1 if self.config.max_in_flight > 1 and len(self.plans) > 1 else 0
        assert most - unsure <= start <= most, "the plan takes the row to be elsewhere"
        num_right = hash(tuple(row.tokens)) % count
        tokens: list[int] = []
        for position in range(start, start + num_right + 1):
            if position >= row.num_prompt + row.params.max_tokens - 1:
                tokens.append(0)  # behind the end: a token for nobody
                continue
            self._compute(row, position, 1)
            tokens.append(self._draw(row))
        for position in range(start + num_right + 1, min(start + count, row.num_prompt + row.params.max_tokens - 1)):
            self.cache[row.slot(position, self.page_size)] = -1
        if count > 1:
            self.num_accepted.append(num_right)
        return tokens

    def _update(self, plan: StepPlan) -> None:
        assert len({fill.row for fill in plan.fills}) == len(plan.fills), "a row is filled twice"
        for fill in plan.fills:
            assert 0 <= fill.row < self.config.max_num_seqs
            self.rows[fill.row] = Row.of(fill)
        filled = {fill.row for fill in plan.fills}
        for row_id, page_idx, page in zip(plan.page_rows, plan.page_idxs, plan.page_ids, strict=True):
            assert row_id not in filled, "a fill holds all pages already"
            assert page_idx == len(self.rows[row_id].pages), "a page was left out"
            self.rows[row_id].pages.append(page)

    def _check_shape(self, plan: StepPlan) -> None:
        assert plan.rows and len(set(plan.rows)) == len(plan.rows), "a row computes twice in one step"
        assert all(count == plan.query_len for count in plan.counts[: plan.num_decode]), plan
        assert all(1 <= count <= self.config.max_chunk_tokens for count in plan.counts[plan.num_decode :]), plan
        assert plan.num_tokens <= self.config.max_num_batched_tokens, "the token budget is exceeded"
        assert len(plan.rows) <= self.config.max_num_seqs
        # A page that two rows write in one step would be a page with two owners.
        written = [
            page
            for row_id, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True)
            for page in self.rows[row_id].pages[start // self.page_size : (start + count - 1) // self.page_size + 1]
        ]
        assert len(set(written)) == len(written), "two rows write one page"

    def _compute(self, row: Row, start: int, count: int) -> None:
        assert start + count <= len(row.tokens), "a token is computed that nobody knows"
        assert start + count <= len(row.pages) * self.page_size, "a token is computed without a page"
        assert len(set(row.pages)) == len(row.pages) and all(0 <= page < self.num_pages for page in row.pages)
        prefix = 0
        for position, token in enumerate(row.tokens[: start + count]):
            prefix = hash((prefix, token))
            slot = row.slot(position, self.page_size)
            if position >= start:
                self.cache[slot] = prefix
            assert self.cache.get(slot) == prefix, f"position {position} of {row.tokens} is not what slot {slot} holds"

    def _reaches_end(self, plan: StepPlan, i: int) -> bool:
        return i < plan.num_decode or plan.starts[i] + plan.counts[i] == len(self.rows[plan.rows[i]].tokens)

    def _draw(self, row: Row) -> int:
        assert len(row.tokens) < row.num_prompt + row.params.max_tokens, "a token beyond max_tokens"
        token = draw(self.next_token, row.tokens, row.num_prompt, row.params, row.sequence_idx, row.ends)
        row.tokens.append(token)
        return token

    def _prompt_logprobs(self, plan: StepPlan, i: int) -> list[PositionLogprobs]:
        row, start, count = self.rows[plan.rows[i]], plan.starts[i], plan.counts[i]
        assert row.params.prompt_logprobs is not None and row.sequence_idx == 0
        return [prompt_logprob(row.tokens, p) for p in range(start + 1, min(start + count + 1, row.num_prompt))]
