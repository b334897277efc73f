"""The state of rows: what kernels make of it is what torch does."""

import pytest
import torch

from deepserve.engine.state import RowState
from hw.select import open_backend

NUM_ROWS, MAX_DRAFTS, MAX_LEN, PAGE_SIZE = 9, 3, 60, 8


@pytest.fixture
def states() -> list[RowState]:
    """The same state twice, worked on in torch and by kernels."""
    backend = open_backend("cpu", cpu_kernels="native")
    found = [RowState(NUM_ROWS, MAX_DRAFTS, MAX_LEN, PAGE_SIZE, backend.runtime, kernels) for kernels in (None, backend.rows)]
    for state in found:
        torch.manual_seed(0)
        state.lens.random_(2, MAX_LEN + 1)
        state.ahead.random_(2)  # so few tokens that drafts often stand
    return found


def some_rows(num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, some of them nobody's, with page tables that end before some of their positions."""
    rows = torch.randperm(NUM_ROWS)[:num]
    rows[torch.rand(num) < 0.2] = NUM_ROWS
    return rows, torch.randint(100, (num, 8), dtype=torch.int32), torch.randint(1, 9, (num,))


def test_steps_and_passes_are_laid_out_alike(states, seed):
    torch.manual_seed(seed)
    for _ in range(50):
        rows, table, num_pages = some_rows(int(torch.randint(0, NUM_ROWS + 1, ())))
        for query_len in range(1, 2 + MAX_DRAFTS):
            one, other = (vars(state.decode_inputs(rows, table, num_pages, query_len)) for state in states)
            assert all(torch.equal(one[name], other[name]) and one[name].dtype is other[name].dtype for name in one)
        for num_passes in range(MAX_DRAFTS):
            one, other = (vars(state.draft_inputs(rows, table, num_pages, num_passes)) for state in states)
            assert all(torch.equal(one[name], other[name]) and one[name].dtype is other[name].dtype for name in one)


def test_rows_move_on_alike(states, seed):
    torch.manual_seed(seed)
    num_accepted = set()
    for _ in range(200):
        num = int(torch.randint(1, NUM_ROWS, ()))
        rows = torch.randperm(NUM_ROWS)[:num]
        query_len, num_decode = int(torch.randint(1, 2 + MAX_DRAFTS, ())), int(torch.randint(0, num + 1, ()))
        tokens = torch.randint(2, (num_decode * query_len + num - num_decode,))
        one, other = (state.settle(rows, tokens, num_decode, query_len) for state in states)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        num_accepted |= set(one[0].tolist())
        assert torch.equal(states[0].lens, states[1].lens) and torch.equal(states[0].ahead, states[1].ahead)
    assert num_accepted == set(range(1 + MAX_DRAFTS))


def test_the_best_is_the_first_of_the_largest(states):
    logits = torch.randn(5, 103).round(decimals=1)
    assert torch.equal(states[1]._kernels.best(logits), logits.argmax(-1))
