"""Captured decode steps: one graph for each of a few batch sizes, replayed on fixed buffers.

A step of n sequences runs in the smallest graph that holds it; the rows left over compute a token that is written nowhere. A graph
begins with the tokens that the steps before it drew and ends with the tokens that this one draws. What the host has to tell it
(positions, slots, lengths, sampling parameters, page tables) goes up in one copy, so a step costs one upload, one launch, one download.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from deepserve.engine.batch import known_tokens
from deepserve.engine.rows import Rows
from deepserve.engine.step import StepPlan
from deepserve.model.decoder import Decoder
from hw.api import Backend, ExpertMode, ExpertStep, SampleInputs
from mla.metadata import AttnMetadata, DecodeMeta

logger = logging.getLogger(__name__)

# One value for each sequence of a step.
FIELDS = {
    "token_ids": np.int64,  # -1: the latest draw of its row
    "rows": np.int64,
    "positions": np.int64,
    "draw_positions": np.int64,
    "slots": np.int64,
    "top_k": np.int64,
    "seed": np.int64,
    "sequence_idx": np.int64,
    "seq_lens": np.int32,
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
}
_ALIGN_BYTES = 16  # kernels read whole vectors


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph, ascending: close together where padding would cost most. `largest` is one of them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 4096, 64)]
    return [size for size in sizes if size < largest] + [largest]


class Layout:
    """Where the fields of a step of `size` sequences lie in one run of bytes: one field after the other."""

    def __init__(self, size: int):
        self._slices, self.num_bytes = {}, 0
        for name, dtype in FIELDS.items():
            end = self.num_bytes + size * np.dtype(dtype).itemsize
            self._slices[name] = slice(self.num_bytes, end)
            self.num_bytes = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES

    def host(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Views of `[num_bytes or more]` uint8."""
        return {name: packed[self._slices[name]].view(dtype) for name, dtype in FIELDS.items()}

    def device(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of `[num_bytes or more]` uint8."""
        return {name: packed[self._slices[name]].view(getattr(torch, np.dtype(dtype).name)) for name, dtype in FIELDS.items()}


@dataclass(frozen=True)
class Replayed:
    """What a graph leaves behind, on the device until the next replay."""

    token_ids: torch.Tensor  # [num_seqs] int64, the tokens that went in
    logits: torch.Tensor | None  # [num_seqs, vocab] fp32; None off rank 0 of the TP group
    tokens: torch.Tensor  # [num_seqs] int64, drawn by temperature and filters alone

    def first(self, num_seqs: int) -> "Replayed":
        logits = None if self.logits is None else self.logits[:num_seqs]
        return Replayed(self.token_ids[:num_seqs], logits, self.tokens[:num_seqs])


class DecodeGraphs:
    """All graphs of one rank. Made once, after the caches; collective over the instance, whose ranks capture alike."""

    def __init__(
        self,
        model: Decoder,
        backend: Backend,
        caches: list[torch.Tensor],
        drawn: torch.Tensor,
        *,
        largest: int,
        max_model_len: int,
        max_dispatch_tokens: int,
    ):
        """Captures every size, the largest first so that the others fit its memory.

        drawn `[num_rows + 1]` int64: latest draw of each row, read and written by the graphs; rows left over use the last place.
        largest: most sequences of a captured step. max_dispatch_tokens: the low-latency dispatch has this size in every graph, so that
        ranks may replay different ones.
        """
        self._model, self._backend, self._caches, self._drawn, self._max_model_len = model, backend, caches, drawn, max_model_len
        self._step = ExpertStep(ExpertMode.LOW_LATENCY, max_dispatch_tokens)
        self.largest = largest
        device, self._page_size = backend.runtime.device, caches[0].shape[1]
        self._packed = torch.zeros(Layout(largest).num_bytes, dtype=torch.uint8, device=device)
        self._page_table = torch.full((largest, -(-max_model_len // self._page_size)), -1, dtype=torch.int32, device=device)
        started = time.perf_counter()
        self._replays: dict[int, Callable[[], Replayed]] = {}
        for size in reversed(graph_sizes(largest)):
            self._clear(size)
            self._replays[size] = backend.runtime.capture(self._work_of(size))
        self._sizes = sorted(self._replays)
        if model.parallel.dp > 1:
            self.idle: Callable[[], None] = backend.runtime.capture(lambda: model.idle(self._step))
        logger.info("captured %d decode steps of up to %d sequences in %.1f s", len(self._sizes), largest, time.perf_counter() - started)

    def _work_of(self, size: int) -> Callable[[], Replayed]:
        fields = Layout(size).device(self._packed)
        decode = DecodeMeta(size, 1, fields["seq_lens"], self._max_model_len, self._page_table[:size])
        meta = AttnMetadata(fields["positions"], fields["slots"], decode, None)
        # One graph serves greedy and sampled rows: kernels look at each row's parameters.
        keys = {name: fields[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "sequence_idx")}
        inputs = SampleInputs(**keys, position=fields["draw_positions"], any_sampled=True, any_filtered=True)
        told, rows = fields["token_ids"], fields["rows"]

        def work() -> Replayed:
            token_ids = torch.where(told < 0, self._drawn[rows], told)
            logits = self._model.logits(self._model.forward(token_ids, meta, self._caches, self._step))
            tokens = torch.empty_like(told) if logits is None else self._backend.ops.sample(logits, inputs)
            self._drawn[rows] = self._backend.tp.broadcast(tokens)
            return Replayed(token_ids, logits, tokens)

        return work

    def fits(self, plan: StepPlan, step: ExpertStep) -> bool:
        """Whether a step can be replayed: it only decodes, every entry draws, and experts are reached without the host."""
        num_seqs = len(plan.rows)
        only_draws = plan.num_single == num_seqs == len(plan.draws) and not plan.prompt_logprobs
        return only_draws and num_seqs <= self.largest and step.mode is ExpertMode.LOW_LATENCY

    def run(self, plan: StepPlan, rows: Rows) -> Replayed:
        """Queue a step that `fits`."""
        num_seqs = len(plan.rows)
        size = next(size for size in self._sizes if size >= num_seqs)
        layout = Layout(size)
        entry_rows, starts = np.asarray(plan.rows, np.int64), np.asarray(plan.starts, np.int64)
        page_table = rows.page_table[entry_rows, : -(-(int(starts.max()) + 1) // self._page_size)]
        packed = np.empty(layout.num_bytes + page_table.nbytes, np.uint8)
        fields = layout.host(packed)
        self._leave_over(fields, num_seqs)
        pages = rows.page_table[entry_rows, starts // self._page_size].astype(np.int64)
        values = {
            "token_ids": known_tokens(plan, rows),
            "rows": entry_rows,
            "positions": starts,
            "draw_positions": starts + 1,
            "slots": pages * self._page_size + starts % self._page_size,
            "seq_lens": starts + 1,
        }
        for name, field in fields.items():
            field[:num_seqs] = values[name] if name in values else getattr(rows, name)[entry_rows]
        packed[layout.num_bytes :] = page_table.reshape(-1).view(np.uint8)
        sent = self._backend.runtime.upload(packed)
        self._packed[: layout.num_bytes] = sent[: layout.num_bytes]
        self._page_table[:num_seqs, : page_table.shape[1]] = sent[layout.num_bytes :].view(torch.int32).view(page_table.shape)
        return self._replays[size]().first(num_seqs)

    def _leave_over(self, fields: dict[str, np.ndarray], num_seqs: int) -> None:
        """Rows from `num_seqs` on are nobody's: they must not write, nor read pages that are others' by now."""
        for field in fields.values():
            field[num_seqs:] = 0
        fields["rows"][num_seqs:] = len(self._drawn) - 1
        fields["slots"][num_seqs:] = -1

    def _clear(self, size: int) -> None:
        """Nobody's rows only, for the time of a capture."""
        packed = np.empty(Layout(size).num_bytes, np.uint8)
        self._leave_over(Layout(size).host(packed), 0)
        self._packed[: len(packed)] = self._backend.runtime.upload(packed)
