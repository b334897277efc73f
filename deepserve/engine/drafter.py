"""Behind a step's draws: which drafts stand, where each row is now, and the drafts for the next step.

The MTP module runs over the very tokens of the step, each paired with the token behind it, and so shares positions, slots and lengths with
the main model: slot i of its cache holds (hidden i, token i + 1). Further passes extend the drafting rows by one position each.
"""

import torch

from deepserve.engine.batch import Drawing
from deepserve.engine.state import RowState
from deepserve.model.decoder import Decoder
from hw.api import Backend, ExpertStep
from mla.metadata import AttnMetadata, DecodeMeta
from mtp.draft import propose


class Drafter:
    """The MTP module of one rank, as the runner uses it."""

    def __init__(self, model: Decoder, backend: Backend, caches: list[torch.Tensor], state: RowState):
        self._model, self._tp, self._caches, self._state = model, backend.tp, caches, state

    def run(
        self,
        drawing: Drawing,
        tokens: torch.Tensor,
        num_drafts: int,
        hidden: torch.Tensor,
        next_ids: torch.Tensor,
        meta: AttnMetadata | None,
        step: ExpertStep,
    ) -> torch.Tensor:
        """Move rows on by their draws `tokens` `[R]` and put `num_drafts` drafts behind each.

        hidden `[num_tokens, hidden]`, next_ids `[num_tokens]` int64 and meta are those of the step, with `tokens` among the next ids;
        without drafts they matter for chunks of prompts only, whose latents shall be there when drafts pay again.
        Returns how many drafts each decode entry accepted, `[num_decode]` int64.
        """
        accepted = self._state.settle(drawing.rows, tokens, drawing.num_decode, drawing.query_len)
        if not num_drafts:
            if self._model.draft_head is not None and meta is not None and meta.prefill is not None:
                self._model.write_drafts(next_ids, hidden, meta, self._caches)
            return accepted
        assert meta is not None
        hidden = self._model.draft(next_ids, hidden, meta, self._caches, step)
        if not len(drawing.rows):
            self._model.idle_drafts(step, num_drafts - 1)  # other ranks may go on
            return accepted
        latest = torch.arange(0, drawing.num_decode * drawing.query_len, drawing.query_len, device=tokens.device) + accepted
        hidden = hidden[torch.cat((latest, drawing.ends)) if len(drawing.ends) else latest]

        def advance(drafts: torch.Tensor, hidden: torch.Tensor, num_passes: int) -> torch.Tensor:
            inputs = self._state.draft_inputs(drawing.rows, drafts, num_passes, drawing.page_table, drawing.num_pages)
            decode = DecodeMeta(len(drafts), 1, inputs.seq_lens, drawing.max_seq_len, drawing.page_table)
            return self._model.draft(drafts, hidden, AttnMetadata(inputs.positions, inputs.slots, decode, None), self._caches, step)

        self._state.ahead[drawing.rows, 1 : 1 + num_drafts] = propose(hidden, num_drafts, self._best, advance)
        return accepted

    def _best(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[R, hidden]` -> its likeliest tokens `[R]` int64, the same on all ranks of the TP group."""
        logits = self._model.logits(hidden)
        tokens = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device) if logits is None else logits.argmax(-1)
        return self._tp.broadcast(tokens)
