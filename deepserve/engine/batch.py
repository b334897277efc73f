"""Plan and rows to input tensors: a pure function of both."""

from dataclasses import dataclass

import numpy as np
import torch

from deepserve.engine.rows import Rows
from deepserve.engine.step import StepPlan
from hw.api import Runtime, Segments
from mla.metadata import AttnMetadata, DecodeMeta, PrefillMeta


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass."""

    token_ids: torch.Tensor  # [num_tokens] int64
    meta: AttnMetadata
    ends: np.ndarray  # [num_entries] index of each entry's last token among the step's tokens
    draws: torch.Tensor | None  # [num_draws] int64, these indices for the entries that draw; None: every token draws, in order


def known_tokens(plan: StepPlan, rows: Rows) -> np.ndarray:
    """Tokens of the single-token entries, `[num_single]` int64; -1 for one that only the device has seen yet: its row's latest draw."""
    entries = zip(plan.rows[: plan.num_single], plan.starts[: plan.num_single], strict=True)
    return np.asarray([-1 if start >= rows.num_known[row] else rows.tokens[row][start] for row, start in entries], np.int64)


def build_batch(plan: StepPlan, rows: Rows, drawn: torch.Tensor, page_size: int, runtime: Runtime) -> Batch:
    """Lay out a step's tokens as `mla.metadata` draws them.

    drawn `[num_rows]` int64 on the device: the latest token of each row, for those that the host has not seen.
    """
    entry_rows = np.asarray(plan.rows, np.int64)
    starts = np.asarray(plan.starts, np.int64)
    counts = np.asarray(plan.counts, np.int64)
    ends = counts.cumsum()
    token_rows = entry_rows.repeat(counts)
    # Position of each token: its entry's start plus its place in the entry.
    positions = np.arange(ends[-1]) - (ends - counts - starts).repeat(counts)
    slots = rows.page_table[token_rows, positions // page_size].astype(np.int64) * page_size + positions % page_size
    singles = plan.num_single
    single_ids = known_tokens(plan, rows)
    unseen = np.flatnonzero(single_ids < 0)
    chunks = [
        rows.tokens[row][start : start + count]
        for row, start, count in zip(plan.rows[singles:], plan.starts[singles:], plan.counts[singles:], strict=True)
    ]
    tokens = np.concatenate((np.maximum(single_ids, 0), *chunks)).astype(np.int64)

    seq_lens = (starts + counts).astype(np.int32)
    max_pages = -(-int(seq_lens.max()) // page_size)
    page_table = rows.page_table[entry_rows, :max_pages]
    to_device = runtime.upload
    decode = prefill = None
    if singles:
        decode = DecodeMeta(
            num_seqs=singles,
            query_len=1,
            seq_lens=to_device(seq_lens[:singles]),
            max_seq_len=int(seq_lens[:singles].max()),
            page_table=to_device(page_table[:singles]),
        )
    if singles < len(plan.rows):
        lens = plan.counts[singles:]
        query_starts = np.zeros(len(lens) + 1, np.int32)
        query_starts[1:] = np.cumsum(lens)
        prefill = PrefillMeta(
            queries=Segments(lens, to_device(query_starts)),
            context_lens=plan.starts[singles:],
            seq_lens=to_device(seq_lens[singles:]),
            page_table=to_device(page_table[singles:]),
        )
    meta = AttnMetadata(to_device(positions), to_device(slots), decode, prefill)
    token_ids = to_device(tokens)
    if unseen.size:
        token_ids[to_device(unseen)] = drawn[to_device(entry_rows[unseen])]
    draws = to_device((ends - 1)[plan.draws]) if len(plan.draws) < len(ends) or ends[-1] > len(ends) else None
    return Batch(token_ids, meta, ends - 1, draws)
