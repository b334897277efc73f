"""From logits to tokens and log-probabilities, with every sampling parameter of `SamplingParams`.

A draw depends on its row's logits, params, tokens so far and position, and on nothing else: not on the batch, not on what was
computed before. So a step may be run again and gives the same tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from deepserve.engine.request import PositionLogprobs
from deepserve.engine.rows import Rows
from hw.api import Logprobs, Ops, PenaltyInputs, Runtime, SampleInputs

# Logit rows of a prompt whose log-probabilities are computed at once; bounds memory at 256 x vocabulary x 4 bytes.
PROMPT_TILE = 256


class _Seen:
    """Token statistics of one penalized row: which tokens its prompt holds and how often each was generated up to `upto`."""

    def __init__(self, tokens: np.ndarray, num_prompt: int, vocab_size: int, device: torch.device):
        self.prompt_mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.prompt_mask[torch.from_numpy(tokens[:num_prompt].astype(np.int64)).to(device)] = True
        self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.upto = num_prompt

    def move_to(self, tokens: np.ndarray, upto: int) -> None:
        """Count generated tokens up to position `upto`, forwards or, after a discarded step, backwards. The host knows them."""
        low, high, step = (self.upto, upto, 1.0) if upto >= self.upto else (upto, self.upto, -1.0)
        if low < high:
            ids = torch.from_numpy(tokens[low:high].astype(np.int64)).to(self.counts.device)
            self.counts.index_add_(0, ids, torch.full((high - low,), step, device=self.counts.device))
        self.upto = upto


class Sampler:
    """Draws the next token of each row. Owns the latest draws, and the penalty counts, which it can move either way."""

    def __init__(self, ops: Ops, rows: Rows, vocab_size: int, runtime: Runtime):
        self.ops, self.rows, self.vocab_size, self._runtime = ops, rows, vocab_size, runtime
        self.device = device = runtime.device
        # [num_rows + 1] latest token of each row, and a place for what rows without a sequence draw
        self.drawn = torch.zeros(rows.page_table.shape[0] + 1, dtype=torch.int64, device=device)
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
        self, logits: torch.Tensor, row_ids: list[int], positions: list[int], latest: torch.Tensor
    ) -> tuple[torch.Tensor, "Wanted | None"]:
        """logits `[R, V]` fp32, changed in place; positions are where the drawn tokens will stand.

        latest `[R]` int64: the tokens right before them, which the host may not have seen.
        Returns tokens `[R]` int64 and the log-probabilities that were asked for, all still on the device.
        """
        rows = self.rows
        wanted = [i for i, row in enumerate(row_ids) if row in rows.with_logprobs] if rows.with_logprobs else []
        wanted_idx = self._ids(wanted) if wanted else None
        raw = logits[wanted_idx] if wanted_idx is not None else None  # a copy
        self._penalize(logits, row_ids, positions, latest)
        self._bias(logits, row_ids, positions)
        tokens = self.ops.sample(logits, self._inputs(row_ids, positions))
        self.note(row_ids, tokens)
        if raw is None:
            return tokens, None
        nums = [rows.params[row_ids[i]].logprobs for i in wanted]
        return tokens, self._wanted(raw, tokens[wanted_idx], nums, wanted)

    def note(self, row_ids: list[int], tokens: torch.Tensor) -> None:
        """Keep the tokens `[R]` just drawn for these rows, here or by rank 0 of the TP group."""
        self.drawn[self._ids(row_ids)] = tokens

    def _ids(self, ids: list[int]) -> torch.Tensor:
        return self._runtime.upload(np.asarray(ids, np.int64))

    def prompt_logprobs(self, logits: torch.Tensor, row: int, first: int) -> "Wanted":
        """Log-probabilities of prompt tokens `first, first + 1, ...`, one for each row of logits `[R, V]` fp32."""
        tokens = self._ids(self.rows.tokens[row][first : first + logits.shape[0]])
        num = self.rows.params[row].prompt_logprobs
        return self._wanted(logits, tokens, [num] * logits.shape[0], list(range(logits.shape[0])))

    def _inputs(self, row_ids: list[int], positions: list[int]) -> SampleInputs:
        rows, ids, tensor = self.rows, np.asarray(row_ids, np.int64), self._runtime.upload
        temperature, top_k, top_p, min_p = rows.temperature[ids], rows.top_k[ids], rows.top_p[ids], rows.min_p[ids]
        return SampleInputs(
            temperature=tensor(temperature),
            top_k=tensor(top_k),
            top_p=tensor(top_p),
            min_p=tensor(min_p),
            seed=tensor(rows.seed[ids]),
            sequence_idx=tensor(rows.sequence_idx[ids]),
            position=tensor(np.asarray(positions, np.int64)),
            any_sampled=bool((temperature > 0).any()),
            any_filtered=bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()),
        )

    def _penalize(self, logits: torch.Tensor, row_ids: list[int], positions: list[int], latest: torch.Tensor) -> None:
        picked = [i for i, row in enumerate(row_ids) if row in self.rows.penalized] if self.rows.penalized else []
        if not picked:
            return
        seen = [self._seen_of(row_ids[i], positions[i]) for i in picked]
        seen_counts = [self._counts(s, positions[i], latest[i : i + 1]) for s, i in zip(seen, picked, strict=True)]
        params = [self.rows.params[row_ids[i]] for i in picked]

        def column(values: list[float]) -> torch.Tensor:
            return self._runtime.upload(np.asarray(values, np.float32))

        inputs = PenaltyInputs(
            rows=self._ids(picked),
            prompt_mask=torch.stack([s.prompt_mask for s in seen]),
            output_counts=torch.stack(seen_counts),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            repetition=column([p.repetition_penalty for p in params]),
        )
        self.ops.penalize(logits, inputs)

    def _seen_of(self, row: int, position: int) -> _Seen:
        tokens = self.rows.tokens[row]
        if row not in self._seen:
            self._seen[row] = _Seen(tokens, int(self.rows.num_prompt[row]), self.vocab_size, self.device)
        self._seen[row].move_to(tokens, min(position, int(self.rows.num_known[row])))
        return self._seen[row]

    def _counts(self, seen: _Seen, position: int, latest: torch.Tensor) -> torch.Tensor:
        """Times that each token was generated before `position`, the latest one included even if only the device has seen it."""
        if seen.upto == position:
            return seen.counts
        assert seen.upto == position - 1, "two tokens of a row are unseen"
        return seen.counts.index_add(0, latest, torch.ones(1, device=self.device))

    def _bias(self, logits: torch.Tensor, row_ids: list[int], positions: list[int]) -> None:
        """Logit bias, then the ban on end tokens before min_tokens."""
        rows = self.rows
        if rows.biased:
            for i, row in enumerate(row_ids):
                if row in rows.biased:
                    bias = rows.params[row].logit_bias
                    logits[i].index_add_(0, self._ids(list(bias)), self._runtime.upload(np.asarray(list(bias.values()), np.float32)))
        if rows.min_length:
            for i, row in enumerate(row_ids):
                if row in rows.min_length and positions[i] - rows.num_prompt[row] < rows.params[row].min_tokens:
                    logits[i].index_fill_(0, self._ids(rows.end_token_ids[row]), -torch.inf)

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
