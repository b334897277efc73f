"""One rank's device side: weights, caches, and the pass from plan to result."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepserve.engine.batch import build_batch
from deepserve.engine.drafter import Drafter
from deepserve.engine.graphs import DecodeGraphs
from deepserve.engine.request import PositionLogprobs
from deepserve.engine.rows import Rows
from deepserve.engine.sampler import PROMPT_TILE, Sampler, Wanted
from deepserve.engine.state import RowState
from deepserve.engine.step import StepPlan, StepResult
from deepserve.model.decoder import Decoder
from hw.api import Backend, ExpertMode, ExpertStep


class Runner:
    """Runs plans. Its only state is the rows, the caches and the penalty counts; all of it can be told again."""

    def __init__(
        self,
        model: Decoder,
        backend: Backend,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_drafts: int = 0,
        num_captured: int = 0,
        max_dispatch_tokens: int = 0,
        overlaps: bool = False,
    ):
        """max_drafts: most drafts that a step makes behind a draw. num_captured: most sequences of a decode step that is captured and
        replayed; 0: none. max_dispatch_tokens: most tokens that a rank brings to experts in such a step.
        overlaps: whether such a step may be overlapped.
        """
        self.model, self.backend, self.page_size = model, backend, page_size
        runtime = backend.runtime
        spec = model.cache_spec()
        assert all(len(layer.paged) == 1 and not layer.state for layer in spec.layers), "one latent entry per layer is all that is laid out"
        self.caches = [
            runtime.zeros((num_pages, page_size, *layer.paged[0].shape), getattr(torch, layer.paged[0].dtype)) for layer in spec.layers
        ]
        # Drafts may lie behind the last position that a sequence can have.
        self.rows = Rows(max_num_seqs, -(-(max_model_len + 2 * max_drafts) // page_size))
        self.state = RowState(max_num_seqs, max_drafts, max_model_len, page_size, runtime, backend.rows)
        self.sampler = Sampler(backend.ops, self.rows, model.config.vocab_size, runtime)
        self.drafter = Drafter(model, backend, self.caches, self.state)
        self.graphs: DecodeGraphs | None = None
        if num_captured:
            with torch.inference_mode():
                self.graphs = DecodeGraphs(
                    model, backend, self.caches, self.state, self.drafter,
                    largest=num_captured, width=self.rows.page_table.shape[1], max_dispatch_tokens=max_dispatch_tokens,
                    overlaps=overlaps,
                )  # fmt: skip

    @torch.inference_mode()
    def launch(self, plan: StepPlan, step: ExpertStep, num_drafts: int | None = None) -> "Launched":
        """Queue one forward pass, the draws behind it and the drafts behind these; waits for nothing that the device has yet to do.

        num_drafts: most that a rank of the instance makes in this step; None: the plan's. All ranks of a TP group call it with the same
        plan and get the same tokens; log-probabilities are rank 0's.
        """
        filled = self.rows.update(plan)
        if filled:
            self.wait()
            self.sampler.forget(filled)
            self.state.fill(filled, self.rows)
        prompt_logprobs: dict[int, list[Wanted]] = {}
        logits, logprobs, new = None, None, False
        captured = None if self.graphs is None else self.graphs.find(plan, step)
        runs: list[tuple[int, int]] = []
        if captured is not None:
            new, captured.new = captured.new, False
            self.graphs.tell(captured, plan, self.rows)
            if self.sampler.draws_plainly(plan.rows):
                self.graphs.run(captured)
            else:  # the draw inside the graph is for nothing
                runs = _runs(plan)
                replayed = captured.target().first(len(captured.tokens))
                logits = replayed.logits
                drawn, logprobs = self._draw(logits, runs, replayed.positions + 1, replayed.token_ids)
                captured.tokens.copy_(drawn)
                self.graphs.settle(captured)
            tokens, accepted = captured.tokens.clone(), captured.accepted.clone()  # the next replay may come before they are read
        else:
            self.wait()
            runs = _runs(plan)
            batch = build_batch(plan, self.rows, self.state, self.page_size, self.backend.runtime)
            hidden = self.model.forward(batch.token_ids, batch.meta, self.caches, step)
            prompt_logprobs = {i: self._prompt_logprobs(plan, i, hidden, int(batch.ends[i])) for i in plan.prompt_logprobs}
            every = slice(None) if batch.draws is None else batch.draws
            logits = self.model.logits(hidden[every]) if runs else None
            tokens, logprobs = self._draw(logits, runs, batch.meta.positions[every] + 1, batch.token_ids[every])
            next_ids = batch.next_ids.index_copy(0, batch.draws, tokens) if batch.draws is not None else tokens
            accepted, latest = self.drafter.settle(batch.drawing, tokens)
            begin = self.drafter.write(batch.drawing, latest, plan.num_drafts, hidden, next_ids, batch.meta)
            if begin is not None:
                replays = self.graphs is not None and self.graphs.can_draft(batch.drawing, step)
                (self.graphs if replays else self.drafter).draft(batch.drawing, plan.num_drafts, begin, step)
        if num_drafts is not None:  # others may go on drafting with experts of ours
            self.model.idle_drafts(step, num_drafts - plan.num_drafts)
        if logits is not None:
            self.sampler.count(runs, tokens, accepted)
        wanted = [*([logprobs] if logprobs else []), *(tile for tiles in prompt_logprobs.values() for tile in tiles)]
        fetch = self.backend.runtime.download([tokens, accepted, *(tensor for one in wanted for tensor in one.tensors)])
        return Launched(plan, new, logprobs, prompt_logprobs, fetch)

    def wait(self) -> None:
        """For drafts that are still being made beside the host's work: before anything that they read changes or goes."""
        if self.graphs is not None:
            self.graphs.wait()

    def __del__(self) -> None:
        if vars(self).get("graphs") is not None:  # it may not have come so far
            self.graphs.wait()

    def collect(self, launched: "Launched") -> StepResult:
        """Wait for a launched step and fetch what it produced. Steps are collected in the order of their launch."""
        plan = launched.plan
        fetched = iter(launched.fetch())
        tokens, accepted = next(fetched).tolist(), next(fetched).tolist()

        def unpack(wanted: Wanted) -> dict[int, PositionLogprobs]:
            return wanted.unpack([next(fetched) for _ in wanted.tensors])

        by_draw = {} if launched.logprobs is None else unpack(launched.logprobs)
        kept: list[list[int]] = []
        logprobs: dict[int, list[PositionLogprobs]] = {}
        first = 0
        for i in plan.draws:
            num_drawn, num_kept = (plan.query_len, accepted[i] + 1) if i < plan.num_decode else (1, 1)
            kept.append(tokens[first : first + num_kept])
            if first in by_draw:
                logprobs[i] = [by_draw[j] for j in range(first, first + num_kept)]
            first += num_drawn
        return StepResult(
            step=plan.step,
            tokens=kept,
            logprobs=logprobs,
            prompt_logprobs={i: [at for tile in tiles for at in unpack(tile).values()] for i, tiles in launched.prompt_logprobs.items()},
        )

    def run(self, plan: StepPlan, step: ExpertStep) -> StepResult:
        """Launch and collect."""
        return self.collect(self.launch(plan, step))

    @torch.inference_mode()
    def idle(self, step: ExpertStep, num_drafts: int = 0) -> None:
        """Take part in a step without tokens of our own, and in `num_drafts` passes of the MTP module."""
        self.wait()
        if self.graphs is not None and step.mode is ExpertMode.LOW_LATENCY:
            self.graphs.idle(num_drafts, step)
        else:
            self.model.idle(step)
            self.model.idle_drafts(step, num_drafts)

    def _draw(
        self, logits: torch.Tensor | None, runs: list[tuple[int, int]], positions: torch.Tensor, inputs: torch.Tensor
    ) -> tuple[torch.Tensor, Wanted | None]:
        """Rank 0 of the TP group, which has the logits, samples and tells the others. For arguments and results see `Sampler.draw`."""
        if not runs:
            return inputs[:0], None
        if logits is None:
            return self.backend.tp.broadcast(torch.empty_like(inputs)), None
        tokens, logprobs = self.sampler.draw(logits, runs, positions, inputs)
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


def _runs(plan: StepPlan) -> list[tuple[int, int]]:
    """(row, number of draws) in order; the draws of a run are at consecutive positions."""
    return [(plan.rows[i], plan.query_len if i < plan.num_decode else 1) for i in plan.draws]


@dataclass(frozen=True)
class Launched:
    """A step on its way through the device."""

    plan: StepPlan
    new: bool  # whether it is a captured step of a kind that had never been replayed
    logprobs: Wanted | None  # by draw
    prompt_logprobs: dict[int, list[Wanted]]  # by entry, in tiles
    # Tokens `[R]` int64, one for each draw, drafts accepted by each decode entry `[num_decode]` int64, then the tensors of the above.
    fetch: Callable[[], list[torch.Tensor]]
