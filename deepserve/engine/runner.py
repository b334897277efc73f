"""One rank's device side: weights, caches, and the pass from plan to result."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepserve.engine.batch import build_batch
from deepserve.engine.graphs import DecodeGraphs
from deepserve.engine.request import PositionLogprobs
from deepserve.engine.rows import Rows
from deepserve.engine.sampler import PROMPT_TILE, Sampler, Wanted
from deepserve.engine.step import StepPlan, StepResult
from deepserve.model.decoder import Decoder
from hw.api import Backend, ExpertMode, ExpertStep


class Runner:
    """Runs plans. Its only state is the row table, the caches and the penalty counts; all of it can be told again."""

    def __init__(
        self,
        model: Decoder,
        backend: Backend,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        num_captured: int = 0,
        max_dispatch_tokens: int = 0,
    ):
        """num_captured: most sequences of a decode step that is captured and replayed; 0: none.

        max_dispatch_tokens: most tokens that a rank brings to experts in such a step.
        """
        self.model, self.backend, self.page_size = model, backend, page_size
        runtime = backend.runtime
        spec = model.cache_spec()
        assert all(len(layer.paged) == 1 and not layer.state for layer in spec.layers), "one latent entry per layer is all that is laid out"
        self.caches = [
            runtime.zeros((num_pages, page_size, *layer.paged[0].shape), getattr(torch, layer.paged[0].dtype)) for layer in spec.layers
        ]
        self.rows = Rows(max_num_seqs, -(-max_model_len // page_size))
        self.sampler = Sampler(backend.ops, self.rows, model.config.vocab_size, runtime)
        self.graphs: DecodeGraphs | None = None
        if num_captured:
            with torch.inference_mode():
                self.graphs = DecodeGraphs(
                    model, backend, self.caches, self.sampler.drawn,
                    largest=num_captured, max_model_len=max_model_len, max_dispatch_tokens=max_dispatch_tokens,
                )  # fmt: skip

    @torch.inference_mode()
    def launch(self, plan: StepPlan, step: ExpertStep) -> "Launched":
        """Queue one forward pass and the draws behind it; waits for nothing that the device has yet to do.

        All ranks of a TP group call it with the same plan and get the same tokens; log-probabilities are rank 0's.
        """
        self.sampler.forget(self.rows.update(plan))
        rows = [plan.rows[i] for i in plan.draws]
        positions = [plan.starts[i] + plan.counts[i] for i in plan.draws]
        prompt_logprobs: dict[int, list[Wanted]] = {}
        if self.graphs is not None and self.graphs.fits(plan, step):
            replayed = self.graphs.run(plan, self.rows)
            tokens, logprobs = replayed.tokens, None
            if not self.sampler.draws_plainly(rows):  # then the draw inside the graph was for nothing
                tokens, logprobs = self._draw(replayed.logits, rows, positions, replayed.token_ids)
        else:
            batch = build_batch(plan, self.rows, self.sampler.drawn, self.page_size, self.backend.runtime)
            hidden = self.model.forward(batch.token_ids, batch.meta, self.caches, step)
            prompt_logprobs = {i: self._prompt_logprobs(plan, i, hidden, int(batch.ends[i])) for i in plan.prompt_logprobs}
            drawing, latest = (x if batch.draws is None else x[batch.draws] for x in (hidden, batch.token_ids))
            tokens, logprobs = self._draw(self.model.logits(drawing) if rows else None, rows, positions, latest)
        wanted = [*([logprobs] if logprobs else []), *(tile for tiles in prompt_logprobs.values() for tile in tiles)]
        fetch = self.backend.runtime.download([tokens, *(tensor for one in wanted for tensor in one.tensors)])
        return Launched(plan, rows, self.rows.num_fills[rows].tolist(), positions, logprobs, prompt_logprobs, fetch)

    def collect(self, launched: "Launched") -> StepResult:
        """Wait for a launched step and fetch what it produced. Steps are collected in the order of their launch."""
        plan = launched.plan
        fetched = iter(launched.fetch())
        tokens = next(fetched).tolist()
        for row, num_fills, position, token in zip(launched.rows, launched.num_fills, launched.positions, tokens, strict=True):
            self.rows.learn(row, num_fills, position, token)

        def unpack(wanted: Wanted) -> dict[int, PositionLogprobs]:
            return wanted.unpack([next(fetched) for _ in wanted.tensors])

        by_draw = {} if launched.logprobs is None else unpack(launched.logprobs)
        return StepResult(
            step=plan.step,
            tokens=tokens,
            logprobs={plan.draws[j]: found for j, found in by_draw.items()},
            prompt_logprobs={i: [at for tile in tiles for at in unpack(tile).values()] for i, tiles in launched.prompt_logprobs.items()},
        )

    def run(self, plan: StepPlan, step: ExpertStep) -> StepResult:
        """Launch and collect."""
        return self.collect(self.launch(plan, step))

    @torch.inference_mode()
    def idle(self, step: ExpertStep) -> None:
        """Take part in a step without tokens of our own."""
        if self.graphs is not None and step.mode is ExpertMode.LOW_LATENCY:
            self.graphs.idle()
        else:
            self.model.idle(step)

    def _draw(
        self, logits: torch.Tensor | None, row_ids: list[int], positions: list[int], latest: torch.Tensor
    ) -> tuple[torch.Tensor, Wanted | None]:
        """Rank 0 of the TP group, which has the logits, samples and tells the others.

        logits `[R, vocab]` fp32; latest, the tokens before the drawn ones, and tokens: `[R]` int64.
        """
        if not row_ids:
            return self.sampler.drawn[:0], None
        if logits is None:
            tokens = self.backend.tp.broadcast(torch.empty(len(row_ids), dtype=torch.int64, device=self.sampler.drawn.device))
            self.sampler.note(row_ids, tokens)
            return tokens, None
        tokens, logprobs = self.sampler.draw(logits, row_ids, positions, latest)
        return self.backend.tp.broadcast(tokens), logprobs

    def _prompt_logprobs(self, plan: StepPlan, entry: int, hidden: torch.Tensor, end: int) -> list[Wanted]:
        """Positions `start + 1 .. start + count` of one entry, as far as they are prompt, a tile of logits at a time."""
        row, start, count = plan.rows[entry], plan.starts[entry], plan.counts[entry]
        num = min(count, int(self.rows.num_prompt[row]) - 1 - start)
        first_hidden = end - count + 1
        found: list[Wanted] = []
        for low in range(0, num, PROMPT_TILE):
            high = min(low + PROMPT_TILE, num)
            logits = self.model.logits(hidden[first_hidden + low : first_hidden + high])
            if logits is not None:
                found.append(self.sampler.prompt_logprobs(logits, row, start + 1 + low))
        return found


@dataclass(frozen=True)
class Launched:
    """A step on its way through the device."""

    plan: StepPlan
    rows: list[int]  # of each draw
    num_fills: list[int]  # of these rows at launch
    positions: list[int]  # where the drawn tokens stand
    logprobs: Wanted | None  # by draw
    prompt_logprobs: dict[int, list[Wanted]]  # by entry, in tiles
    fetch: Callable[[], list[torch.Tensor]]  # tokens `[num_draws]` int64, then the tensors of all of the above in order
