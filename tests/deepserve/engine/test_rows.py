"""The runner's row table: fills replace everything, deltas add pages."""

from array import array

import msgspec
import numpy as np
import pytest

from deepserve.engine.request import SamplingParams
from deepserve.engine.rows import Rows
from deepserve.engine.step import RowFill, StepPlan


def fill(row: int, *, pages=(0,), tokens=(1, 2, 3), num_prompt=3, sequence_idx=0, ends=(), **params) -> RowFill:
    checked = SamplingParams(**{"max_tokens": 4, "seed": 9, **params})
    return RowFill(row, sequence_idx, num_prompt, array("i", tokens).tobytes(), list(pages), checked, tuple(ends))


def plan(*fills: RowFill, pages: dict[tuple[int, int], int] | None = None) -> StepPlan:
    places = pages or {}
    return StepPlan(
        step=0,
        fills=list(fills),
        page_rows=[row for row, _ in places],
        page_idxs=[idx for _, idx in places],
        page_ids=list(places.values()),
        rows=[],
        starts=[],
        counts=[],
        num_decode=0,
        query_len=1,
        num_drafts=0,
        draws=[],
        prompt_logprobs=[],
    )


def test_a_fill_sets_its_row_and_no_other():
    rows = Rows(3, 4)
    filled = rows.update(plan(fill(1, pages=[7, 5], sequence_idx=2, ends=[1, 8], temperature=0.5, top_k=3, top_p=0.25, min_p=0.5, seed=-4)))
    assert filled == [1]
    assert rows.page_table.tolist() == [[-1] * 4, [7, 5, -1, -1], [-1] * 4]
    assert rows.tokens[1].tolist() == [1, 2, 3] and rows.tokens[1].dtype == np.int32
    assert rows.num_pages.tolist() == [0, 2, 0]
    assert (rows.num_prompt[1], rows.sequence_idx[1], rows.seed[1]) == (3, 2, -4)
    assert (rows.temperature[1], rows.top_k[1], rows.top_p[1], rows.min_p[1]) == (0.5, 3, 0.25, 0.5)
    assert rows.end_token_ids[1] == (1, 8)
    assert rows.tokens[0].size == rows.tokens[2].size == 0 and rows.params[0] is None


def test_pages_are_added_where_the_plan_says():
    rows = Rows(2, 4)
    rows.update(plan(fill(0, pages=[3]), fill(1, pages=[4, 6])))
    assert rows.update(plan(pages={(0, 1): 9, (1, 2): 8, (1, 3): 2})) == []
    assert rows.page_table.tolist() == [[3, 9, -1, -1], [4, 6, 8, 2]] and rows.num_pages.tolist() == [2, 4]


def test_fills_come_before_pages_of_one_plan():
    rows = Rows(2, 3)
    rows.update(plan(fill(0, pages=[1]), fill(1, pages=[2])))
    rows.update(plan(fill(1, pages=[5]), pages={(0, 1): 6}))
    assert rows.page_table.tolist() == [[1, 6, -1], [5, -1, -1]]


def test_a_new_tenant_finds_nothing_of_the_old_one():
    rows = Rows(1, 4)
    rows.update(plan(fill(0, pages=[1, 2, 3], presence_penalty=1.0, logit_bias={3: 1.0}, min_tokens=2, logprobs=1, top_k=5, ends=[7])))
    assert rows.penalized == rows.biased == rows.min_length == rows.with_logprobs == {0}
    rows.update(plan(fill(0, pages=[4], tokens=[6], num_prompt=1)))
    assert rows.penalized == rows.biased == rows.min_length == rows.with_logprobs == set()
    assert rows.page_table.tolist() == [[4, -1, -1, -1]]
    assert rows.tokens[0].tolist() == [6] and rows.num_pages[0] == 1
    assert (rows.top_k[0], rows.top_p[0], rows.min_p[0], rows.temperature[0]) == (0, 1.0, 0.0, 1.0)
    assert rows.end_token_ids[0] == ()


@pytest.mark.parametrize(
    ("params", "members"),
    [
        ({}, ()),
        ({"presence_penalty": -0.5}, ("penalized",)),
        ({"frequency_penalty": 0.5}, ("penalized",)),
        ({"repetition_penalty": 1.5}, ("penalized",)),
        ({"logit_bias": {}}, ()),
        ({"logit_bias": {3: 0.0}}, ("biased",)),
        ({"min_tokens": 1}, ("min_length",)),
        ({"logprobs": 0}, ("with_logprobs",)),
        ({"prompt_logprobs": 3}, ()),
    ],
)
def test_rows_that_need_more_work_are_known(params, members):
    rows = Rows(2, 1)
    rows.update(plan(fill(1, **params)))
    for name in ("penalized", "biased", "min_length", "with_logprobs"):
        assert getattr(rows, name) == ({1} if name in members else set())


@pytest.mark.parametrize(
    ("params", "temperature", "top_k"), [({"temperature": 1e-6}, 0.0, 0), ({"temperature": 0.0}, 0.0, 0), ({"top_k": -1}, 1.0, 0)]
)
def test_spellings_of_off(params, temperature, top_k):
    rows = Rows(1, 1)
    rows.update(plan(fill(0, **params)))
    assert (rows.temperature[0], rows.top_k[0]) == (temperature, top_k)


def test_plans_survive_the_wire():
    sent = plan(fill(0, logit_bias={3: 1.0}, stop=["x"], ends=[1]), pages={(0, 1): 9})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=StepPlan) == sent
