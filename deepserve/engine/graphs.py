"""Captured decode steps: one graph for each of a few batch sizes, replayed on fixed buffers.

A step of n sequences runs in the smallest graph that holds it; the rows left over compute a token that is written nowhere. What
varies from step to step (tokens, positions, slots, page tables, lengths) lies in buffers that all graphs share, so a step costs the
host a few small copies and one launch.
"""

import logging
import time
from collections.abc import Callable

import torch

from deepserve.engine.batch import Batch
from deepserve.engine.step import StepPlan
from deepserve.model.decoder import Decoder
from hw.api import Backend, ExpertMode, ExpertStep
from mla.metadata import AttnMetadata, DecodeMeta

logger = logging.getLogger(__name__)


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph, ascending: close together where padding would cost most. `largest` is one of them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 4096, 64)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """All graphs of one rank. Made once, after the caches."""

    def __init__(self, model: Decoder, backend: Backend, caches: list[torch.Tensor], *, largest: int, max_model_len: int):
        """Captures every size, the largest first so that the others fit its memory. `largest`: most sequences of a captured step."""
        self._model, self._caches, self._max_model_len = model, caches, max_model_len
        self.largest = largest
        device, page_size = backend.runtime.device, caches[0].shape[1]
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._slots = torch.full((largest,), -1, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(largest, dtype=torch.int32, device=device)
        self._page_table = torch.full((largest, -(-max_model_len // page_size)), -1, dtype=torch.int32, device=device)
        started = time.perf_counter()
        self._replays: dict[int, Callable[[], torch.Tensor | None]] = {}
        for size in reversed(graph_sizes(largest)):
            self._replays[size] = backend.runtime.capture(self._step_of(size))
        self._sizes = sorted(self._replays)
        logger.info("captured %d decode steps of up to %d sequences in %.1f s", len(self._sizes), largest, time.perf_counter() - started)

    def _step_of(self, size: int) -> Callable[[], torch.Tensor | None]:
        decode = DecodeMeta(size, 1, self._seq_lens[:size], self._max_model_len, self._page_table[:size])
        meta = AttnMetadata(self._positions[:size], self._slots[:size], decode, None)
        step = ExpertStep(ExpertMode.LOW_LATENCY, size)

        def run() -> torch.Tensor | None:
            return self._model.logits(self._model.forward(self._token_ids[:size], meta, self._caches, step))

        return run

    def fits(self, plan: StepPlan, step: ExpertStep) -> bool:
        """Whether a step can be replayed: it only decodes, every entry draws, and experts are reached without the host."""
        num_seqs = len(plan.rows)
        only_draws = plan.num_single == num_seqs == len(plan.draws) and not plan.prompt_logprobs
        return only_draws and num_seqs <= self.largest and step.mode is ExpertMode.LOW_LATENCY

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Logits `[num_seqs, vocab]` fp32 of a step that `fits`, None off rank 0 of the TP group. Valid until the next replay."""
        decode = batch.meta.decode
        assert decode is not None and batch.meta.prefill is None
        num_seqs, num_pages = decode.page_table.shape
        size = next(size for size in self._sizes if size >= num_seqs)
        self._token_ids[:num_seqs] = batch.token_ids
        self._positions[:num_seqs] = batch.meta.positions
        self._slots[:num_seqs] = batch.meta.slots
        self._seq_lens[:num_seqs] = decode.seq_lens
        self._page_table[:num_seqs, :num_pages] = decode.page_table
        # Rows of earlier steps must not write, nor read pages that are others' by now.
        self._slots[num_seqs:size] = -1
        self._seq_lens[num_seqs:size] = 0
        logits = self._replays[size]()
        return None if logits is None else logits[:num_seqs]
