"""The layout of a step's tensors, against a construction token by token."""

import random
from array import array

import numpy as np
import torch

from deepserve.engine.batch import build_batch
from deepserve.engine.request import SamplingParams
from deepserve.engine.rows import Rows
from deepserve.engine.state import RowState
from deepserve.engine.step import RowFill, StepPlan
from hw.cpu.runtime import CpuRuntime

PAGE_SIZE = 4
MAX_PAGES = 12
MAX_LEN = MAX_PAGES * PAGE_SIZE
MAX_DRAFTS = 3


def fill_of(row: int, tokens: list[int], pages: list[int]) -> RowFill:
    return RowFill(row, 0, len(tokens), array("i", tokens).tobytes(), pages, SamplingParams(max_tokens=1, seed=0), ())


def plan_of(fills: list[RowFill], entries: list[tuple[int, int, int]], num_decode: int, draws: list[int]) -> StepPlan:
    """entries are (row, start, count), those that decode first."""
    rows, starts, counts = (list(column) for column in zip(*entries, strict=True))
    return StepPlan(
        step=0,
        fills=fills,
        page_rows=[],
        page_idxs=[],
        page_ids=[],
        rows=rows,
        starts=starts,
        counts=counts,
        num_decode=num_decode,
        query_len=counts[0] if num_decode else 1,
        num_drafts=0,
        draws=draws,
        prompt_logprobs=[],
    )


def random_plan(rng: random.Random, num_rows: int) -> StepPlan:
    """Rows that decode stand at their last token; the pages of some end there, those of others have room for the drafts."""
    ids = list(range(100))
    rng.shuffle(ids)
    query_len = rng.randrange(1, MAX_DRAFTS + 2)
    fills, decoding, chunks = [], [], []
    for row in rng.sample(range(num_rows), rng.randrange(1, num_rows + 1)):
        length = rng.randrange(1, MAX_LEN)
        num_pages = -(-length // PAGE_SIZE) + rng.randrange(2)
        pages, ids = ids[: min(num_pages, MAX_PAGES)], ids[num_pages:]
        fills.append(fill_of(row, [rng.randrange(1000) for _ in range(length)], pages))
        if rng.random() < 0.5:
            decoding.append((row, length - 1, query_len))
        else:
            start = rng.randrange(length)
            chunks.append((row, start, rng.randrange(1, length - start + 1)))
    draws = list(range(len(decoding)))
    lens = {fill.row: len(fill.tokens) // 4 for fill in fills}
    draws += [len(decoding) + i for i, (row, start, count) in enumerate(chunks) if start + count == lens[row]]
    return plan_of(fills, decoding + chunks, len(decoding), draws)


def state_of(plan: StepPlan, rows: Rows, num_rows: int) -> RowState:
    state = RowState(num_rows, MAX_DRAFTS, MAX_LEN, PAGE_SIZE, CpuRuntime())
    state.ahead.random_(1000)
    state.fill(rows.update(plan), rows)
    return state


def test_against_a_token_by_token_construction(seed):
    rng = random.Random(seed)
    for _ in range(200):
        plan = random_plan(rng, num_rows=6)
        rows = Rows(6, MAX_PAGES + 2)
        state = state_of(plan, rows, 6)
        batch = build_batch(plan, rows, state, PAGE_SIZE, CpuRuntime())
        pages_of = {fill.row: fill.pages for fill in plan.fills}
        tokens_of = {fill.row: np.frombuffer(fill.tokens, np.int32).tolist() for fill in plan.fills}
        for row in plan.rows[: plan.num_decode]:
            tokens_of[row] = tokens_of[row] + state.ahead[row, 1:].tolist()
        tokens, next_ids, positions, slots, ends, draws = [], [], [], [], [], []
        for i, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            for position in range(start, start + count):
                tokens.append(tokens_of[row][position])
                next_ids.append(tokens_of[row][position + 1] if position + 1 < len(tokens_of[row]) else 0)
                positions.append(min(position, MAX_LEN - 1))
                page = positions[-1] // PAGE_SIZE
                slots.append(pages_of[row][page] * PAGE_SIZE + positions[-1] % PAGE_SIZE if page < len(pages_of[row]) else -1)
                if i < plan.num_decode or (i in plan.draws and position == start + count - 1):
                    draws.append(len(tokens) - 1)
            ends.append(len(tokens) - 1)
        assert batch.token_ids.tolist() == tokens
        num_decoding = plan.num_decode * plan.query_len  # what follows these will be drawn
        assert batch.next_ids.tolist()[num_decoding:] == next_ids[num_decoding:]
        assert batch.meta.positions.tolist() == positions
        assert batch.meta.slots.tolist() == slots
        assert batch.ends.tolist() == ends
        assert (list(range(len(tokens))) if batch.draws is None else batch.draws.tolist()) == draws
        assert {t.dtype for t in (batch.token_ids, batch.meta.positions, batch.meta.slots)} == {torch.int64}
        check_decode(plan, batch.meta.decode, pages_of)
        check_prefill(plan, batch.meta.prefill, pages_of)
        check_drawing(plan, batch, pages_of)


def check_drawing(plan: StepPlan, batch, pages_of) -> None:
    drawing = batch.drawing
    rows = [plan.rows[i] for i in plan.draws]
    assert (drawing.num_decode, drawing.query_len, drawing.rows.tolist()) == (plan.num_decode, plan.query_len, rows)
    assert drawing.ends.tolist() == [batch.ends[i] for i in plan.draws[plan.num_decode :]]
    assert drawing.num_pages.tolist() == [len(pages_of[row]) for row in rows]
    for i, row in enumerate(rows):
        check_table(drawing.page_table[i], row, len(pages_of[row]) * PAGE_SIZE, pages_of)


def check_table(table: torch.Tensor, row: int, seq_len: int, pages_of: dict[int, list[int]]) -> None:
    """The pages of all visible tokens that the row has, in order; what stands behind is of no interest, but no place outside the cache."""
    pages = pages_of[row][: -(-seq_len // PAGE_SIZE)]
    found = table.tolist()
    assert found[: len(pages)] == pages[: len(found)]
    assert min(found) >= 0


def check_decode(plan: StepPlan, decode, pages_of) -> None:
    num, query_len = plan.num_decode, plan.query_len
    if not num:
        assert decode is None
        return
    lens = [start + query_len for start in plan.starts[:num]]
    assert (decode.num_seqs, decode.query_len, decode.max_seq_len, decode.num_tokens) == (num, query_len, max(lens), num * query_len)
    assert decode.seq_lens.tolist() == lens and decode.seq_lens.dtype == decode.page_table.dtype == torch.int32
    for i, row in enumerate(plan.rows[:num]):
        check_table(decode.page_table[i], row, lens[i], pages_of)


def check_prefill(plan: StepPlan, prefill, pages_of) -> None:
    starts, counts = plan.starts[plan.num_decode :], plan.counts[plan.num_decode :]
    if not counts:
        assert prefill is None
        return
    lens = [start + count for start, count in zip(starts, counts, strict=True)]
    assert (prefill.queries.lens, prefill.context_lens, prefill.seq_lens.tolist()) == (counts, starts, lens)
    assert prefill.queries.starts.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert prefill.queries.starts.dtype == prefill.seq_lens.dtype == prefill.page_table.dtype == torch.int32
    for i, row in enumerate(plan.rows[plan.num_decode :]):
        check_table(prefill.page_table[i], row, lens[i], pages_of)


def test_large_pages_do_not_overflow_slots():
    # Slots count tokens: with page ids near 2^31 they pass 32 bits.
    page = (1 << 31) - 1
    for num_decode, entry, wanted in ((0, (0, 0, 2), [0, 1]), (1, (0, 1, 1), [1])):
        plan = plan_of([fill_of(0, [5, 6], [page])], [entry], num_decode, [0])
        rows = Rows(1, 3)
        state = state_of(plan, rows, 1)
        slots = build_batch(plan, rows, state, PAGE_SIZE, CpuRuntime()).meta.slots
        assert slots.tolist() == [page * PAGE_SIZE + offset for offset in wanted]
