"""The layout of a step's tensors, against a construction token by token."""

import random
from array import array

import numpy as np
import torch

from deepserve.engine.batch import build_batch
from deepserve.engine.request import SamplingParams
from deepserve.engine.rows import Rows
from deepserve.engine.step import RowFill, StepPlan
from hw.cpu.runtime import CpuRuntime

PAGE_SIZE = 4
MAX_PAGES = 12
SEEN = torch.zeros(8, dtype=torch.int64)  # no token is unseen, so these are not read


def fill_of(row: int, tokens: list[int], pages: list[int]) -> RowFill:
    return RowFill(row, 0, len(tokens), array("i", tokens).tobytes(), pages, SamplingParams(max_tokens=1, seed=0), ())


def plan_of(fills: list[RowFill], entries: list[tuple[int, int, int]]) -> StepPlan:
    """entries are (row, start, count), single tokens first."""
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
        num_single=sum(count == 1 for count in counts),
        draws=[],
        prompt_logprobs=[],
    )


def random_plan(rng: random.Random, num_rows: int) -> StepPlan:
    ids = list(range(100))
    rng.shuffle(ids)
    fills, entries = [], []
    for row in rng.sample(range(num_rows), rng.randrange(1, num_rows + 1)):
        length = rng.randrange(1, MAX_PAGES * PAGE_SIZE)
        num_pages = -(-length // PAGE_SIZE)
        pages, ids = ids[:num_pages], ids[num_pages:]
        fills.append(fill_of(row, [rng.randrange(1000) for _ in range(length)], pages))
        start = rng.randrange(length)
        entries.append((row, start, rng.choice([1, rng.randrange(1, length - start + 1)])))
    rng.shuffle(entries)
    entries.sort(key=lambda entry: entry[2] > 1)
    return plan_of(fills, entries)


def test_against_a_token_by_token_construction(seed):
    rng = random.Random(seed)
    for _ in range(200):
        plan = random_plan(rng, num_rows=6)
        rows = Rows(6, MAX_PAGES)
        rows.update(plan)
        batch = build_batch(plan, rows, SEEN, PAGE_SIZE, CpuRuntime())
        pages_of = {fill.row: fill.pages for fill in plan.fills}
        tokens_of = {fill.row: np.frombuffer(fill.tokens, np.int32) for fill in plan.fills}
        tokens, positions, slots, ends = [], [], [], []
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            for position in range(start, start + count):
                tokens.append(int(tokens_of[row][position]))
                positions.append(position)
                slots.append(pages_of[row][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
            ends.append(len(tokens) - 1)
        assert batch.token_ids.tolist() == tokens
        assert batch.meta.positions.tolist() == positions
        assert batch.meta.slots.tolist() == slots
        assert batch.ends.tolist() == ends
        assert {t.dtype for t in (batch.token_ids, batch.meta.positions, batch.meta.slots)} == {torch.int64}
        check_decode(plan, batch.meta.decode, pages_of)
        check_prefill(plan, batch.meta.prefill, pages_of)


def check_table(table: torch.Tensor, row: int, seq_len: int, pages_of: dict[int, list[int]]) -> None:
    """The pages of all visible tokens, in order; what stands behind is of no interest but a page or -1."""
    num_pages = -(-seq_len // PAGE_SIZE)
    found = table.tolist()
    assert found[:num_pages] == pages_of[row][:num_pages]
    assert all(page == -1 or page in pages_of[row] for page in found[num_pages:])


def check_decode(plan: StepPlan, decode, pages_of) -> None:
    singles = plan.num_single
    if not singles:
        assert decode is None
        return
    lens = [start + 1 for start in plan.starts[:singles]]
    assert (decode.num_seqs, decode.query_len, decode.max_seq_len, decode.num_tokens) == (singles, 1, max(lens), singles)
    assert decode.seq_lens.tolist() == lens and decode.seq_lens.dtype == decode.page_table.dtype == torch.int32
    for i, row in enumerate(plan.rows[:singles]):
        check_table(decode.page_table[i], row, lens[i], pages_of)


def check_prefill(plan: StepPlan, prefill, pages_of) -> None:
    singles = plan.num_single
    starts, counts = plan.starts[singles:], plan.counts[singles:]
    if not counts:
        assert prefill is None
        return
    lens = [start + count for start, count in zip(starts, counts, strict=True)]
    assert (prefill.queries.lens, prefill.context_lens, prefill.seq_lens.tolist()) == (counts, starts, lens)
    assert prefill.queries.starts.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert prefill.queries.starts.dtype == prefill.seq_lens.dtype == prefill.page_table.dtype == torch.int32
    for i, row in enumerate(plan.rows[singles:]):
        check_table(prefill.page_table[i], row, lens[i], pages_of)


def test_large_pages_do_not_overflow_slots():
    # Slots count tokens: with page ids near 2^31 they pass 32 bits.
    page = (1 << 31) - 1
    plan = plan_of([fill_of(0, [5, 6], [page])], [(0, 0, 2)])
    rows = Rows(1, 1)
    rows.update(plan)
    assert build_batch(plan, rows, SEEN, PAGE_SIZE, CpuRuntime()).meta.slots.tolist() == [
        page * PAGE_SIZE,
        page * PAGE_SIZE + 1,
    ]
