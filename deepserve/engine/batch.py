"""Plan, rows and row state to input tensors."""

from dataclasses import dataclass

import numpy as np
import torch

from deepserve.engine.rows import Rows
from deepserve.engine.state import RowState
from deepserve.engine.step import StepPlan
from hw.api import Runtime, Segments
from mla.metadata import AttnMetadata, DecodeMeta, PrefillMeta


@dataclass(frozen=True)
class Drawing:
    """The entries of a step that draw: `num_decode` that decode, with `query_len` draws each, then last chunks of prompts, with one."""

    rows: torch.Tensor  # [num_draws] int64
    num_decode: int
    query_len: int
    ends: torch.Tensor  # [num_draws - num_decode] int64, last token of each chunk among the step's tokens
    page_table: torch.Tensor  # [num_draws, width] int32
    num_pages: torch.Tensor  # [num_draws] int64
    max_seq_len: int  # upper bound of their lengths behind this step


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass."""

    token_ids: torch.Tensor  # [num_tokens] int64
    next_ids: torch.Tensor  # [num_tokens] int64, what follows each token, where it will not be drawn
    meta: AttnMetadata
    ends: np.ndarray  # [num_entries] index of each entry's last token among the step's tokens
    draws: torch.Tensor | None  # [R] int64, tokens behind which one is drawn; None: all of them, in order
    drawing: Drawing


def usable_pages(rows: Rows, entry_rows: np.ndarray, width: int) -> np.ndarray:
    """Page tables `[n, width]` int32 for the device. A kernel may look up pages that a row lacks, for tokens that it may not have; it must
    find some page there, whatever it holds.
    """
    return np.maximum(rows.page_table[entry_rows, :width], 0)


def build_batch(plan: StepPlan, rows: Rows, state: RowState, page_size: int, runtime: Runtime) -> Batch:
    """Lay out a step's tokens as `mla.metadata` draws them. Those of decode entries come from the device."""
    to_device, num_decode, query_len = runtime.upload, plan.num_decode, plan.query_len
    entry_rows = np.asarray(plan.rows, np.int64)
    starts, counts = np.asarray(plan.starts, np.int64), np.asarray(plan.counts, np.int64)
    ends = counts.cumsum()
    max_seq_len = int((starts + counts).max()) + state.max_drafts
    page_table = to_device(usable_pages(rows, entry_rows, -(-max_seq_len // page_size)))
    row_ids, num_pages = to_device(entry_rows), to_device(rows.num_pages[entry_rows])

    pieces: list[tuple[torch.Tensor, ...]] = []
    decode = prefill = None
    if num_decode:
        some = slice(num_decode)
        inputs = state.decode_inputs(row_ids[some], page_table[some], num_pages[some], query_len)
        decode = DecodeMeta(
            num_seqs=num_decode,
            query_len=query_len,
            seq_lens=inputs.seq_lens,
            max_seq_len=int((starts + counts)[some].max()),
            page_table=page_table[some],
        )
        pieces.append((inputs.token_ids, inputs.token_ids, inputs.positions, inputs.slots))
    if num_decode < len(plan.rows):
        lens, context_lens = plan.counts[num_decode:], plan.starts[num_decode:]
        query_starts = np.zeros(len(lens) + 1, np.int32)
        query_starts[1:] = np.cumsum(lens)
        prefill = PrefillMeta(
            queries=Segments(lens, to_device(query_starts)),
            context_lens=context_lens,
            seq_lens=to_device((starts + counts)[num_decode:].astype(np.int32)),
            page_table=page_table[num_decode:],
        )
        pieces.append(tuple(to_device(_chunks(plan, rows, page_size)).unbind()))
    token_ids, next_ids, positions, slots = pieces[0] if len(pieces) == 1 else (torch.cat(parts) for parts in zip(*pieces, strict=True))

    chunk_draws = np.asarray(plan.draws[num_decode:], np.int64)
    chunk_ends = to_device(ends[chunk_draws] - 1)
    drawing_all = len(plan.draws) == len(plan.rows)
    draws = None
    if len(chunk_draws) or not drawing_all:
        draws = torch.cat((torch.arange(num_decode * query_len, device=row_ids.device), chunk_ends))
    picked = slice(None) if drawing_all else to_device(np.asarray(plan.draws, np.int64))
    drawing = Drawing(row_ids[picked], num_decode, query_len, chunk_ends, page_table[picked], num_pages[picked], max_seq_len)
    return Batch(token_ids, next_ids, AttnMetadata(positions, slots, decode, prefill), ends - 1, draws, drawing)


def _chunks(plan: StepPlan, rows: Rows, page_size: int) -> np.ndarray:
    """Tokens, the tokens behind them, positions and slots of all prefill chunks: `[4, num_tokens]` int64."""
    found = []
    for row, start, count in zip(*(column[plan.num_decode :] for column in (plan.rows, plan.starts, plan.counts)), strict=True):
        tokens = rows.tokens[row]
        next_ids = np.zeros(count, np.int64)  # nobody knows what follows the last known token
        known = tokens[start + 1 : start + count + 1]
        next_ids[: len(known)] = known
        positions = np.arange(start, start + count)
        slots = rows.page_table[row, positions // page_size].astype(np.int64) * page_size + positions % page_size
        found.append(np.stack((tokens[start : start + count], next_ids, positions, slots)))
    return np.concatenate(found, axis=1)
