"""How far each row is, kept on the device: steps are laid out there from what the steps before them came to.

The host need not have seen that yet. It knows upper bounds, and says anew where a row stands whenever it fills one.
"""

from dataclasses import dataclass

import numpy as np
import torch

from deepserve.engine.rows import Rows
from hw.api import Runtime
from hw.row_kernels import RowKernels
from mtp.verify import accepted_lens


@dataclass(frozen=True)
class DecodeInputs:
    """Tokens of the decode entries of a step, entry after entry."""

    token_ids: torch.Tensor  # [num_seqs * query_len] int64
    positions: torch.Tensor  # [num_seqs * query_len] int64
    slots: torch.Tensor  # [num_seqs * query_len] int64, -1 behind the last page of a row
    seq_lens: torch.Tensor  # [num_seqs] int32


class RowState:
    """Known tokens and drafts of each row. The last row belongs to nobody: rows that a captured step has left over use it."""

    def __init__(
        self, num_rows: int, max_drafts: int, max_model_len: int, page_size: int, runtime: Runtime, kernels: RowKernels | None = None
    ):
        """kernels: do what `lay_out` and `settle` else do in torch."""
        self.num_rows, self.max_drafts, self.max_model_len, self.page_size = num_rows, max_drafts, max_model_len, page_size
        self._runtime, self._kernels = runtime, kernels
        device = runtime.device
        self.lens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)  # known tokens; the last one is not computed yet
        # [num_rows + 1, 1 + max_drafts] int64: latest token, then drafts of those behind it; any tokens where there are none
        self.ahead = torch.zeros(num_rows + 1, 1 + max_drafts, dtype=torch.int64, device=device)

    def fill(self, filled: list[int], rows: Rows) -> None:
        """These rows were filled: they stand where their known tokens end."""
        if not filled:
            return
        tokens = [rows.tokens[row] for row in filled]
        told = self._runtime.upload(np.asarray([filled, [len(t) for t in tokens], [t[-1] for t in tokens]], np.int64))
        self.lens[told[0]] = told[1]
        self.ahead[told[0], 0] = told[2]

    def decode_inputs(self, rows: torch.Tensor, page_table: torch.Tensor, num_pages: torch.Tensor, query_len: int) -> DecodeInputs:
        """The latest token and the first drafts of each of `rows` `[n]` int64.

        page_table `[n, width]` int32, num_pages `[n]` int64. Tokens past a row's last page (drafts of what it may not have) write nowhere.
        """
        return self._lay_out(rows, page_table, num_pages, query_len, 0, -1)

    def draft_inputs(self, rows: torch.Tensor, page_table: torch.Tensor, num_pages: torch.Tensor, num_passes: int) -> DecodeInputs:
        """What the MTP module pairs with a hidden state after `num_passes` passes: of each of `rows` the latest token or, later, the latest
        draft, at the position before it.
        """
        return self._lay_out(rows, page_table, num_pages, 1, num_passes, num_passes - 2)

    def _lay_out(
        self, rows: torch.Tensor, page_table: torch.Tensor, num_pages: torch.Tensor, query_len: int, place: int, shift: int
    ) -> DecodeInputs:
        """`query_len` tokens of each of `rows`, those from `place` on of what is ahead; the first stands at `shift` from the row's end."""
        if self._kernels is not None:
            return DecodeInputs(*self._kernels.lay_out(
                self.lens, self.ahead, rows, page_table, num_pages, query_len=query_len, place=place, shift=shift,
                page_size=self.page_size, max_model_len=self.max_model_len,
            ))  # fmt: skip
        owned = rows < self.num_rows
        first = torch.where(owned, self.lens[rows] + shift, -query_len)
        token_ids = self.ahead[rows, place : place + query_len]
        positions = first[:, None] + torch.arange(query_len, device=first.device)
        positions = positions.clamp(0, self.max_model_len - 1)
        page_idx = positions // self.page_size
        pages = page_table.gather(1, page_idx.clamp(max=page_table.shape[1] - 1)).long()
        slots = pages * self.page_size + positions % self.page_size
        slots = torch.where((page_idx < num_pages[:, None]) & owned[:, None], slots, -1)
        return DecodeInputs(token_ids.reshape(-1), positions.flatten(), slots.flatten(), (first + query_len).int())

    def settle(self, rows: torch.Tensor, tokens: torch.Tensor, num_decode: int, query_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Move `rows` `[n]` on by what was drawn for them: the first `num_decode` have `query_len` draws each in `tokens`, the others one.

        Returns how many drafts each of the first ones accepted and which draw is its latest token now, `[num_decode]` int64 each.
        """
        if self._kernels is not None:
            return self._kernels.settle(self.lens, self.ahead, rows, tokens, num_decode, query_len)
        draws = tokens[: num_decode * query_len].view(num_decode, query_len)
        decoding, others = rows[:num_decode], rows[num_decode:]
        accepted = self.accepted(decoding, draws)
        self.lens[decoding] += accepted + 1
        self.ahead[decoding, 0] = draws.gather(1, accepted[:, None])[:, 0]
        if len(others):
            self.lens[others] += 1
            self.ahead[others, 0] = tokens[num_decode * query_len :]
        return accepted, torch.arange(0, num_decode * query_len, query_len, device=tokens.device) + accepted

    def accepted(self, rows: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """How many drafts of each of `rows` `[n]` stand, given draws `[n, query_len]`: `[n]` int64."""
        return accepted_lens(draws, self.ahead[rows, 1 : draws.shape[1]])
