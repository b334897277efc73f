"""What a backend may do in one kernel each with the state of rows, which `deepserve.engine.state` keeps and else works on in torch."""

from typing import Protocol

import torch


class RowKernels(Protocol):
    """lens `[num_rows + 1]` int64: known tokens of each row. ahead `[num_rows + 1, W]` int64: its latest token, then drafts. The last row
    is nobody's.
    """

    def lay_out(
        self, lens: torch.Tensor, ahead: torch.Tensor, rows: torch.Tensor, page_table: torch.Tensor, num_pages: torch.Tensor,
        *, query_len: int, place: int, shift: int, page_size: int, max_model_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """`query_len` tokens of each of `rows` `[n]` int64, those from `place` on in `ahead`, the first at position lens + shift.

        page_table `[n, width]` int32, num_pages `[n]` int64. Returns token ids, positions (within 0 .. max_model_len - 1) and slots (-1
        behind a row's last page, and of nobody's row), `[n * query_len]` int64 each, and lengths with these tokens, `[n]` int32, 0 of
        nobody's row.
        """

    def settle(
        self, lens: torch.Tensor, ahead: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, num_decode: int, query_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move `rows` `[n]` int64 on by `tokens` int64: `query_len` draws of each of the first `num_decode`, whose drafts stand as far as
        they equal the draws before them, and one of each of the others. In place.

        Returns how many stand and which of `tokens` is the latest, `[num_decode]` int64 each.
        """

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row, `[R]` int64, the first of equals: logits `[R, V]` fp32."""
