"""One rank's device side: weights, caches, and the pass from plan to result."""

import torch

from deepserve.engine.batch import build_batch
from deepserve.engine.request import PositionLogprobs
from deepserve.engine.rows import Rows
from deepserve.engine.sampler import PROMPT_TILE, Sampler
from deepserve.engine.step import StepPlan, StepResult
from deepserve.model.decoder import Decoder
from hw.api import Backend, ExpertStep


class Runner:
    """Runs plans. Its only state is the row table, the caches and the penalty counts; all of it can be told again."""

    def __init__(self, model: Decoder, backend: Backend, *, num_pages: int, page_size: int, max_num_seqs: int, max_model_len: int):
        self.model, self.backend, self.page_size = model, backend, page_size
        runtime = backend.runtime
        spec = model.cache_spec()
        assert all(len(layer.paged) == 1 and not layer.state for layer in spec.layers), "one latent entry per layer is all that is laid out"
        self.caches = [
            runtime.zeros((num_pages, page_size, *layer.paged[0].shape), getattr(torch, layer.paged[0].dtype)) for layer in spec.layers
        ]
        self.rows = Rows(max_num_seqs, -(-max_model_len // page_size))
        self.sampler = Sampler(backend.ops, self.rows, model.config.vocab_size, runtime.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan, step: ExpertStep) -> StepResult:
        """One forward pass and the draws behind it. All ranks of a TP group call it with the same plan and get the same tokens.

        Log-probabilities are rank 0's; the others return none.
        """
        self.sampler.forget(self.rows.update(plan))
        batch = build_batch(plan, self.rows, self.page_size, self.backend.runtime.device)
        hidden = self.model.forward(batch.token_ids, batch.meta, self.caches, step)
        row_ids = [plan.rows[i] for i in plan.draws]
        positions = [plan.starts[i] + plan.counts[i] for i in plan.draws]
        tokens, by_draw = self._draw(hidden[batch.ends[plan.draws]], row_ids, positions)
        for row, position, token in zip(row_ids, positions, tokens, strict=True):
            if position < len(self.rows.tokens[row]):
                self.rows.tokens[row][position] = token
        logprobs = {plan.draws[j]: found for j, found in by_draw.items()}
        prompt_logprobs = {i: self._prompt_logprobs(plan, i, hidden, int(batch.ends[i])) for i in plan.prompt_logprobs}
        return StepResult(plan.step, tokens, logprobs, prompt_logprobs)

    @torch.inference_mode()
    def idle(self, step: ExpertStep) -> None:
        """Take part in a step without tokens of our own."""
        self.model.idle(step)

    def _draw(self, hidden: torch.Tensor, row_ids: list[int], positions: list[int]) -> tuple[list[int], dict[int, PositionLogprobs]]:
        """Rank 0 of the TP group samples and tells the others."""
        if not row_ids:
            return [], {}
        logits = self.model.logits(hidden)
        if logits is None:
            drawn = torch.empty(len(row_ids), dtype=torch.int64, device=hidden.device)
            return self.backend.tp.broadcast(drawn).tolist(), {}
        tokens, logprobs = self.sampler.draw(logits, row_ids, positions)
        self.backend.tp.broadcast(torch.tensor(tokens, dtype=torch.int64, device=hidden.device))
        return tokens, logprobs

    def _prompt_logprobs(self, plan: StepPlan, entry: int, hidden: torch.Tensor, end: int) -> list[PositionLogprobs]:
        """Positions `start + 1 .. start + count` of one entry, as far as they are prompt, a tile of logits at a time."""
        row, start, count = plan.rows[entry], plan.starts[entry], plan.counts[entry]
        num = min(count, int(self.rows.num_prompt[row]) - 1 - start)
        first_hidden = end - count + 1
        found: list[PositionLogprobs] = []
        for low in range(0, num, PROMPT_TILE):
            high = min(low + PROMPT_TILE, num)
            logits = self.model.logits(hidden[first_hidden + low : first_hidden + high])
            if logits is not None:
                found += self.sampler.prompt_logprobs(logits, row, start + 1 + low)
        return found
