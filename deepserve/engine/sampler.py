"""From logits to tokens and log-probabilities, with every sampling parameter of `SamplingParams`.

A draw depends on its row's logits, params, tokens so far and position, and on nothing else: not on the batch, not on what was
computed before. So a step may be run again and gives the same tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from deepserve.engine.request import PositionLogprobs, SamplingParams
from deepserve.engine.rows import Rows
from hw.api import Logprobs, Ops, PenaltyInputs, Runtime, SampleInputs

# Logit rows of a prompt whose log-probabilities are computed at once; bounds memory at 256 x vocabulary x 4 bytes.
PROMPT_TILE = 256


class _Seen:
    """Token statistics of one penalized row: which tokens its prompt holds and how often each was generated, up to its latest token."""

    def __init__(self, tokens: np.ndarray, num_prompt: int, vocab_size: int, device: torch.device):
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        self.prompt_mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.prompt_mask[ids[:num_prompt]] = True
        self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.counts.index_add_(0, ids[num_prompt:], torch.ones(len(ids) - num_prompt, device=device))

    def with_drafts(self, drafts: torch.Tensor) -> torch.Tensor:
        """drafts `[k]` -> counts before each of k + 1 draws `[k + 1, vocab]`: draw j is behind the first j drafts."""
        counts = self.counts.repeat(len(drafts) + 1, 1)
        for j in range(len(drafts)):
            later = counts[j + 1 :]
            later.index_add_(1, drafts[j : j + 1], later.new_ones(len(later), 1))
        return counts

    def add(self, draws: torch.Tensor, num_kept: torch.Tensor) -> None:
        """The first `num_kept` (on the device) of draws `[k + 1]` were generated."""
        kept = torch.arange(len(draws), device=draws.device) < num_kept
        self.counts.index_add_(0, draws, kept.float())


class Sampler:
    """Draws the next tokens of each row. Owns the penalty counts, which begin anew whenever a row is filled."""

    def __init__(self, ops: Ops, rows: Rows, vocab_size: int, runtime: Runtime):
        self.ops, self.rows, self.vocab_size, self._runtime = ops, rows, vocab_size, runtime
        self.device = runtime.device
        self._seen: dict[int, _Seen] = {}

    def forget(self, filled: list[int]) -> None:
        """These rows were filled anew."""
        for row in filled:
            self._seen.pop(row, None)

    def draws_plainly(self, row_ids: list[int]) -> bool:
        """Whether temperature, filters and seed say all about these rows' draws, and nobody wants log-probabilities."""
        rows = self.rows
        return all(some.isdisjoint(row_ids) for some in (rows.penalized, rows.biased, rows.min_length, rows.with_logprobs))

    def draw(
        self, logits: torch.Tensor, runs: list[tuple[int, int]], positions: torch.Tensor, inputs: torch.Tensor
    ) -> tuple[torch.Tensor, "Wanted | None"]:
        """logits `[R, V]` fp32, changed in place, one row for each draw.

        runs: (row, number of draws) in order; the draws of a run are at consecutive positions. positions `[R]` int64: where the drawn
        tokens will stand. inputs `[R]` int64: the token right before each, which within a run is a draft. Returns tokens `[R]` int64 and
        the log-probabilities that were asked for, by draw, all still on the device.
        """
        rows = self.rows
        row_ids = [row for row, count in runs for _ in range(count)]
        wanted = [i for i, row in enumerate(row_ids) if row in rows.with_logprobs] if rows.with_logprobs else []
        wanted_idx = self._ids(wanted) if wanted else None
        raw = logits[wanted_idx] if wanted_idx is not None else None  # a copy
        self._penalize(logits, runs, inputs)
        self._bias(logits, row_ids, positions)
        tokens = self.ops.sample(logits, self._inputs(row_ids, positions))
        if raw is None:
            return tokens, None
        nums = [rows.params[row_ids[i]].logprobs for i in wanted]
        return tokens, self._wanted(raw, tokens[wanted_idx], nums, wanted)

    def count(self, runs: list[tuple[int, int]], tokens: torch.Tensor, accepted: torch.Tensor) -> None:
        """Tokens `[R]` were drawn; of the first runs, `accepted` drafts and one more draw each were kept, of the others all."""
        if not self.rows.penalized:
            return
        first = 0
        for i, (row, count) in enumerate(runs):
            if row in self._seen:
                self._seen[row].add(tokens[first : first + count], accepted[i] + 1 if i < len(accepted) else accepted.new_ones(()))
            first += count

    def _ids(self, ids: list[int]) -> torch.Tensor:
        return self._runtime.upload(np.asarray(ids, np.int64))

    def prompt_logprobs(self, logits: torch.Tensor, row: int, first: int) -> "Wanted":
        """Log-probabilities of prompt tokens `first, first + 1, ...`, one for each row of logits `[R, V]` fp32."""
        tokens = self._ids(self.rows.tokens[row][first : first + logits.shape[0]])
        num = self.rows.params[row].prompt_logprobs
        return self._wanted(logits, tokens, [num] * logits.shape[0], list(range(logits.shape[0])))

    def _inputs(self, row_ids: list[int], positions: torch.Tensor) -> SampleInputs:
        rows, ids, tensor = self.rows, np.asarray(row_ids, np.int64), self._runtime.upload
        temperature, top_k, top_p, min_p = rows.temperature[ids], rows.top_k[ids], rows.top_p[ids], rows.min_p[ids]
        return SampleInputs(
            temperature=tensor(temperature),
            top_k=tensor(top_k),
            top_p=tensor(top_p),
            min_p=tensor(min_p),
            seed=tensor(rows.seed[ids]),
            sequence_idx=tensor(rows.sequence_idx[ids]),
            position=positions,
            any_sampled=bool((temperature > 0).any()),
            any_filtered=bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()),
        )

    def _penalize(self, logits: torch.Tensor, runs: list[tuple[int, int]], inputs: torch.Tensor) -> None:
        if not self.rows.penalized:
            return
        picked: list[int] = []
        masks: list[torch.Tensor] = []
        counts: list[torch.Tensor] = []
        params: list[SamplingParams] = []
        first = 0
        for row, count in runs:
            if row in self.rows.penalized:
                seen = self._seen_of(row)
                picked += range(first, first + count)
                masks.append(seen.prompt_mask.expand(count, -1))
                counts.append(seen.with_drafts(inputs[first + 1 : first + count]))
                params += [self.rows.params[row]] * count
            first += count
        if not picked:
            return

        def column(values: list[float]) -> torch.Tensor:
            return self._runtime.upload(np.asarray(values, np.float32))

        penalties = PenaltyInputs(
            rows=self._ids(picked),
            prompt_mask=torch.cat(masks),
            output_counts=torch.cat(counts),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            repetition=column([p.repetition_penalty for p in params]),
        )
        self.ops.penalize(logits, penalties)

    def _seen_of(self, row: int) -> _Seen:
        if row not in self._seen:
            self._seen[row] = _Seen(self.rows.tokens[row], int(self.rows.num_prompt[row]), self.vocab_size, self.device)
        return self._seen[row]

    def _bias(self, logits: torch.Tensor, row_ids: list[int], positions: torch.Tensor) -> None:
        """Logit bias, then the ban on end tokens before min_tokens."""
        rows = self.rows
        if rows.biased:
            for i, row in enumerate(row_ids):
                if row in rows.biased:
                    bias = rows.params[row].logit_bias
                    logits[i].index_add_(0, self._ids(list(bias)), self._runtime.upload(np.asarray(list(bias.values()), np.float32)))
        if rows.min_length:
            for i, row in enumerate(row_ids):
                if row in rows.min_length:
                    ends = self._ids(rows.end_token_ids[row])
                    too_early = positions[i] < int(rows.num_prompt[row]) + rows.params[row].min_tokens
                    logits[i].index_copy_(0, ends, torch.where(too_early, -torch.inf, logits[i][ends]))

    def _wanted(self, logits: torch.Tensor, tokens: torch.Tensor, nums: list[int], keys: list[int]) -> "Wanted":
        """The token that stands at each row of logits, then its `nums[i]` best."""
        return Wanted(keys, nums, tokens, self.ops.logprobs(logits, tokens, min(max(nums, default=0), self.vocab_size)))


@dataclass(frozen=True)
class Wanted:
    """Log-probabilities on the device, until the host asks."""

    keys: list[int]
    nums: list[int]  # alternatives of each
    tokens: torch.Tensor  # [R] int64
    result: Logprobs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the host has to fetch."""
        return [self.tokens, self.result.token, self.result.rank, self.result.top_ids, self.result.top]

    def unpack(self, fetched: list[torch.Tensor]) -> dict[int, PositionLogprobs]:
        """By key, from the tensors once they are on the host."""
        return {
            key: PositionLogprobs([token, *top_ids[:num]], [logprob, *top[:num]], rank)
            for token, logprob, rank, top_ids, top, num, key in zip(*(t.tolist() for t in fetched), self.nums, self.keys, strict=True)
        }
