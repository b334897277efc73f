"""Captured decode steps: four graphs for each of a few batch sizes and numbers of drafts, replayed on fixed buffers.

A step of n sequences runs in the smallest graphs that hold it; the rows left over compute a token that is written nowhere. The first
graph begins with what the steps before it left in the row state and ends with draws; the second moves the row state on. The other two are
of steps with drafts: one writes the MTP module's latents, one drafts, beside whatever the host does until the next step. What the host has
to tell them (rows, sampling parameters, page tables) goes up in one copy, unless it is what went up last, so a step costs at most one
upload, four launches, one download. Before the second graph it may draw anew, for what the first cannot do: penalties, biases,
log-probabilities.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from deepserve.engine.batch import Drawing, usable_pages
from deepserve.engine.drafter import Drafter
from deepserve.engine.rows import Rows
from deepserve.engine.state import RowState
from deepserve.engine.step import StepPlan
from deepserve.model.decoder import Decoder
from hw.api import Backend, ExpertMode, ExpertStep, SampleInputs
from mla.metadata import AttnMetadata, DecodeMeta

logger = logging.getLogger(__name__)

# One value for each sequence of a step.
ROW_FIELDS = {"rows": np.int64, "num_pages": np.int64}
# One value for each draw of a step.
DRAW_FIELDS = {
    "top_k": np.int64,
    "seed": np.int64,
    "sequence_idx": np.int64,
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
}
FIELDS = {**ROW_FIELDS, **DRAW_FIELDS}
_ALIGN_BYTES = 16  # kernels read whole vectors


def _nothing() -> None:
    """To wait for."""


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph, ascending: close together where padding would cost most. `largest` is one of them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 4096, 64)]
    return [size for size in sizes if size < largest] + [largest]


class Layout:
    """Where the fields of a step of `size` sequences with `query_len` draws each lie in one run of bytes: one field after the other."""

    def __init__(self, size: int, query_len: int):
        self._slices, self.num_bytes = {}, 0
        for name, dtype in FIELDS.items():
            end = self.num_bytes + size * (query_len if name in DRAW_FIELDS else 1) * np.dtype(dtype).itemsize
            self._slices[name] = slice(self.num_bytes, end)
            self.num_bytes = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        self.packed = np.zeros(self.num_bytes, np.uint8)  # what the host has to say
        self.fields = {name: self.packed[self._slices[name]].view(dtype) for name, dtype in FIELDS.items()}

    def device(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of `[num_bytes or more]` uint8."""
        return {name: packed[self._slices[name]].view(getattr(torch, np.dtype(dtype).name)) for name, dtype in FIELDS.items()}


@dataclass(frozen=True)
class Replayed:
    """What the first graph leaves behind, on the device until the next replay. R is num_seqs * query_len."""

    token_ids: torch.Tensor  # [R] int64, the tokens that went in
    positions: torch.Tensor  # [R] int64, where they stand
    logits: torch.Tensor | None  # [R, vocab] fp32; None off rank 0 of the TP group

    def first(self, num: int) -> "Replayed":
        if num == len(self.token_ids):
            return self
        return Replayed(self.token_ids[:num], self.positions[:num], None if self.logits is None else self.logits[:num])


@dataclass
class CapturedStep:
    """How steps of one kind are replayed. R is num_seqs * query_len."""

    key: tuple[int, int]  # size, query length
    target: Callable[[], Replayed]
    settle: Callable[[], Callable[[], None]]  # what follows on the target; the result waits for drafts
    whole: Callable[[], Callable[[], None]]  # the target too
    tokens: torch.Tensor  # [R] int64, drawn by the target by temperature and filters alone; what stands here is settled
    accepted: torch.Tensor  # [num_seqs] int64, how many drafts of each stand
    new: bool  # whether none like it was replayed yet: then it may take longer than it will from now on


class DecodeGraphs:
    """All graphs of one rank. Made once, after the caches; collective over the instance, whose ranks capture alike."""

    def __init__(
        self, model: Decoder, backend: Backend, caches: list[torch.Tensor], state: RowState, drafter: Drafter, *, largest: int, width: int,
        max_dispatch_tokens: int, overlaps: bool = False,
    ):  # fmt: skip
        """Captures every size, the largest first so that the others fit its memory.

        largest: most sequences of a captured step. width: of the rows' page tables. max_dispatch_tokens: the low-latency dispatch has this
        size in every graph, so that ranks may replay different ones; steps whose drafts would not fit it are not captured.
        overlaps: every step is captured as an overlapped one too.
        """
        self._model, self._backend, self._caches, self._state, self._drafter = model, backend, caches, state, drafter
        step = ExpertStep(ExpertMode.LOW_LATENCY, max_dispatch_tokens)
        self._steps = [step, replace(step, overlapped=True)] if overlaps else [step]
        self._max_seq_len = width * caches[0].shape[1]
        most_tokens = max_dispatch_tokens * model.parallel.tp
        # By query length, ascending.
        most_seqs = {q: min(largest, most_tokens // q) for q in range(1, state.max_drafts + 2) if most_tokens >= q}
        every = backend.runtime.captures_any_size
        self._sizes = {q: list(range(1, most + 1)) if every else graph_sizes(most) for q, most in most_seqs.items()}
        keys = sorted(((size, q) for q, sizes in self._sizes.items() for size in sizes), key=lambda key: key[0] * key[1], reverse=True)
        device, num_tokens = backend.runtime.device, keys[0][0] * keys[0][1]
        self._layouts = {key: Layout(*key) for key in keys}
        self._packed = torch.zeros(max(layout.num_bytes for layout in self._layouts.values()), dtype=torch.uint8, device=device)
        self._page_table = torch.zeros((largest, width), dtype=torch.int32, device=device)
        self._hidden = torch.zeros((num_tokens, model.config.hidden_size), dtype=model.dtype, device=device)
        self._tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._accepted = torch.zeros(largest, dtype=torch.int64, device=device)
        self._latest = torch.zeros_like(self._accepted)  # which draw is each sequence's latest token
        self._begin = torch.zeros((largest, model.config.hidden_size), dtype=model.dtype, device=device)  # what drafts begin with
        # Where the tokens stand, for the second graph: it begins with the row state as the first one found it.
        self._positions, self._slots = torch.zeros_like(self._tokens), torch.zeros_like(self._tokens)
        self._seq_lens = torch.zeros(largest, dtype=torch.int32, device=device)
        self._wait = _nothing
        self._told: tuple | None = None  # what went up last
        self._kinds: dict[tuple[int, int, int, bool], CapturedStep | None] = {}  # by sequences, query length, drafts, whether overlapped
        self._seen: set[tuple[int, int, int]] = set()  # sizes, query lengths and drafts to make among them
        started = time.perf_counter()
        self._targets: dict[tuple[int, int, bool], Callable[[], Replayed]] = {}  # by size, query length, whether overlapped
        self._settlers: dict[tuple[int, int], Callable[[], None]] = {}  # by size, query length
        self._writers: dict[tuple[int, int], Callable[[], None]] = {}  # by size, query length
        self._drafters: dict[tuple[int, int], Callable[[], None]] = {}  # by size, drafts to make
        self._drafting: dict[tuple[int, int], Callable[[], Callable[[], None]]] = {}  # the same, as what is begun
        for key in keys:
            self._clear(key)
            for step in self._steps:
                self._targets[*key, step.overlapped] = backend.runtime.capture(self._target(*key, step))
            self._settlers[key] = backend.runtime.capture(self._settle(*key))
            if state.max_drafts:
                self._writers[key] = backend.runtime.capture(self._write(*key))
            for num_drafts in range(1, state.max_drafts + 1) if key[1] == 1 else [key[1] - 1]:
                if (key[0], num_drafts) not in self._drafters:
                    self._drafters[key[0], num_drafts] = backend.runtime.capture(self._draft(key[0], num_drafts))
        self._idle: dict[tuple[int, bool], Callable[[], None]] = {}  # by drafts, whether overlapped
        for num_drafts in range(state.max_drafts + 1) if model.parallel.dp > 1 else ():
            for step in self._steps:
                self._idle[num_drafts, step.overlapped] = backend.runtime.capture(self._serve(num_drafts, step))
        logger.info("captured %d decode steps of up to %d sequences in %.1f s", len(keys), largest, time.perf_counter() - started)

    def _meta(self, size: int, query_len: int) -> AttnMetadata:
        num = size * query_len
        decode = DecodeMeta(size, query_len, self._seq_lens[:size], self._max_seq_len, self._page_table[:size])
        return AttnMetadata(self._positions[:num], self._slots[:num], decode, None)

    def _target(self, size: int, query_len: int, step: ExpertStep) -> Callable[[], Replayed]:
        fields, table = self._layouts[size, query_len].device(self._packed), self._page_table[:size]
        num, meta = size * query_len, self._meta(size, query_len)

        def work() -> Replayed:
            inputs = self._state.decode_inputs(fields["rows"], table, fields["num_pages"], query_len)
            meta.positions.copy_(inputs.positions)
            meta.slots.copy_(inputs.slots)
            self._seq_lens[:size] = inputs.seq_lens
            hidden = self._model.forward(inputs.token_ids, meta, self._caches, step)
            logits = self._model.logits(hidden)
            if logits is not None:
                keys = {name: fields[name] for name in DRAW_FIELDS}
                # One graph serves greedy and sampled rows: kernels look at each row's parameters.
                sample = SampleInputs(**keys, position=inputs.positions + 1, any_sampled=True, any_filtered=True)
                self._tokens[:num] = self._backend.ops.sample(logits, sample)
            self._backend.tp.broadcast(self._tokens[:num])
            self._hidden[:num] = hidden
            return Replayed(inputs.token_ids, inputs.positions, logits)

        return work

    def _drawing(self, size: int, query_len: int) -> Drawing:
        fields, nothing = Layout(size, query_len).device(self._packed), self._tokens[:0]
        return Drawing(fields["rows"], size, query_len, nothing, self._page_table[:size], fields["num_pages"], self._max_seq_len)

    def _settle(self, size: int, query_len: int) -> Callable[[], None]:
        tokens, drawing = self._tokens[: size * query_len], self._drawing(size, query_len)

        def work() -> None:
            self._accepted[:size], self._latest[:size] = self._drafter.settle(drawing, tokens)

        return work

    def _write(self, size: int, query_len: int) -> Callable[[], None]:
        tokens, hidden, drawing = self._tokens[: size * query_len], self._hidden[: size * query_len], self._drawing(size, query_len)
        meta, latest = self._meta(size, query_len), self._latest[:size]

        def work() -> None:
            begin = self._drafter.write(drawing, latest, 1, hidden, tokens, meta)
            assert begin is not None
            self._begin[:size] = begin

        return work

    def _draft(self, size: int, num_drafts: int) -> Callable[[], None]:
        drawing, hidden = self._drawing(size, 1), self._begin[:size]  # rows and pages lie first in any layout of this size
        return lambda: self._drafter.draft(drawing, num_drafts, hidden, self._steps[0])

    def _serve(self, num_drafts: int, step: ExpertStep) -> Callable[[], None]:
        def work() -> None:
            self._model.idle(step)
            self._model.idle_drafts(self._steps[0], num_drafts)

        return work

    def idle(self, num_drafts: int, step: ExpertStep) -> None:
        """Queue a step without tokens of our own."""
        self._idle[num_drafts, step.overlapped]()

    def find(self, plan: StepPlan, step: ExpertStep) -> CapturedStep | None:
        """How to replay a step; None: it cannot be. It must only decode, verify as many drafts as it makes or none, and need no host for
        experts.
        """
        if plan.num_decode != len(plan.rows) or plan.prompt_logprobs or step.mode is not ExpertMode.LOW_LATENCY:
            return None
        name = plan.num_decode, plan.query_len, plan.num_drafts, step.overlapped
        if name not in self._kinds:
            self._kinds[name] = self._kind(*name)
        return self._kinds[name]

    def _kind(self, num_seqs: int, query_len: int, num_drafts: int, overlapped: bool) -> CapturedStep | None:
        fitting = self._sizes.get(query_len)
        if fitting is None or num_seqs > fitting[-1] or query_len not in (1, 1 + num_drafts):
            return None
        size = next(size for size in fitting if size >= num_seqs)
        key, chain = (size, query_len), self._backend.runtime.chain
        target, settler = self._targets[*key, overlapped], self._settlers[key]
        beside = [self._writers[key], self._drafters[size, num_drafts]] if num_drafts else []
        new = (*key, num_drafts) not in self._seen
        self._seen.add((*key, num_drafts))
        tokens, accepted = self._tokens[: num_seqs * query_len], self._accepted[:num_seqs]
        return CapturedStep(key, target, chain([settler], beside), chain([target, settler], beside), tokens, accepted, new)

    def tell(self, captured: CapturedStep, plan: StepPlan, rows: Rows) -> None:
        """Send what the graphs of a step have to know. Before `run`, or before its target."""
        last = max(plan.starts) + plan.query_len + plan.num_drafts  # drafts reach that far if all before them stand
        told = captured.key, plan.rows, rows.num_changes, -(-last // self._state.page_size)
        self.wait()
        if told != self._told:
            self._tell(captured.key, plan, rows, width=told[-1])
            self._told = told

    def run(self, captured: CapturedStep) -> None:
        """Queue a step whose draws are plain."""
        self._wait = captured.whole()

    def settle(self, captured: CapturedStep) -> None:
        """Queue what follows on the target and on draws that took the place of its own."""
        self._wait = captured.settle()

    def _tell(self, key: tuple[int, int], plan: StepPlan, rows: Rows, width: int) -> None:
        """Send what the graphs of `key` have to know, with the first `width` pages of each row."""
        (size, query_len), num_seqs, layout = key, len(plan.rows), self._layouts[key]
        fields = layout.fields
        if num_seqs < size:
            self._leave_over(fields, num_seqs, query_len)
        entry_rows = fields["rows"][:num_seqs]
        entry_rows[:] = plan.rows
        draw_rows = entry_rows if query_len == 1 else entry_rows.repeat(query_len)
        rows.num_pages.take(entry_rows, out=fields["num_pages"][:num_seqs], mode="clip")
        for name in DRAW_FIELDS:
            getattr(rows, name).take(draw_rows, out=fields[name][: len(draw_rows)], mode="clip")  # the other modes would copy it twice
        page_table = usable_pages(rows, entry_rows, width)
        self._backend.runtime.send((layout.packed, self._packed[: layout.num_bytes]), (page_table, self._page_table[:num_seqs, :width]))

    def can_draft(self, drawing: Drawing, step: ExpertStep) -> bool:
        """Whether `draft` serves a step that was not replayed itself: other ranks must reach experts in the same way."""
        alike = replace(step, overlapped=False) == self._steps[0]
        return 0 < len(drawing.rows) <= self._sizes[1][-1] and (alike or self._model.parallel.ep == 1)

    def draft(self, drawing: Drawing, num_drafts: int, hidden: torch.Tensor, step: ExpertStep) -> None:
        """See `Drafter.draft`."""
        num_seqs, width = drawing.page_table.shape
        size = next(size for size in self._sizes[1] if size >= num_seqs)
        fields = self._layouts[size, 1].device(self._packed)
        self._told = None
        fields["rows"][num_seqs:], fields["num_pages"][num_seqs:] = self._state.num_rows, 0
        fields["rows"][:num_seqs], fields["num_pages"][:num_seqs] = drawing.rows, drawing.num_pages
        self._page_table[:num_seqs, :width] = drawing.page_table
        self._begin[:num_seqs] = hidden
        if (size, num_drafts) not in self._drafting:
            self._drafting[size, num_drafts] = self._backend.runtime.chain([], [self._drafters[size, num_drafts]])
        self._wait = self._drafting[size, num_drafts]()

    def wait(self) -> None:
        """Until drafts are made, where that is not in the order of the device's queue. Before any other step, and before weights change."""
        self._wait()
        self._wait = _nothing

    def _leave_over(self, fields: dict[str, np.ndarray], num_seqs: int, query_len: int) -> None:
        """Rows from `num_seqs` on are nobody's: they must not write, nor read pages that are others' by now."""
        for name, field in fields.items():
            field[num_seqs * query_len if name in DRAW_FIELDS else num_seqs :] = 0
        fields["rows"][num_seqs:] = self._state.num_rows

    def _clear(self, key: tuple[int, int]) -> None:
        """Nobody's rows only, for the time of a capture."""
        layout = self._layouts[key]
        self._leave_over(layout.fields, 0, key[1])
        self._backend.runtime.send((layout.packed, self._packed[: layout.num_bytes]))
