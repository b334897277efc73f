"""Behind a step's draws: which drafts stand, where each row is now, and the drafts for the next step.

The MTP module has the main model's positions, slots and lengths: slot i of its cache holds (hidden i, token i + 1). Of all tokens of a step
only the latents are written. Passes of the whole module run for what is behind a draft alone: the first one at each row's latest token, the
others one position on each.
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
        self._model, self._tp, self._kernels, self._caches, self._state = model, backend.tp, backend.rows, caches, state

    def settle(self, drawing: Drawing, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Move rows on by their draws `tokens` `[R]`: see `RowState.settle`."""
        return self._state.settle(drawing.rows, tokens, drawing.num_decode, drawing.query_len)

    def write(
        self, drawing: Drawing, latest: torch.Tensor, num_drafts: int, hidden: torch.Tensor, next_ids: torch.Tensor, meta: AttnMetadata
    ) -> torch.Tensor | None:
        """Write the MTP module's latents of a step where `num_drafts` are to be made.

        latest `[num_decode]` int64: from `settle`. hidden `[num_tokens, hidden]`, next_ids `[num_tokens]` int64 and meta are those of the
        step, with its draws among the next ids; without drafts they matter for chunks of prompts only, whose latents shall be there when
        drafts pay again. Returns what `draft` begins with, `[num_draws, hidden]`; None: nothing.
        """
        if self._model.draft_head is None or not (num_drafts or meta.prefill is not None):
            return None
        begin = self._model.write_drafts(next_ids, hidden, meta, self._caches)
        return begin[torch.cat((latest, drawing.ends)) if len(drawing.ends) else latest] if num_drafts else None

    def draft(self, drawing: Drawing, num_drafts: int, hidden: torch.Tensor, step: ExpertStep) -> None:
        """Put `num_drafts` drafts behind each row. hidden `[num_draws, hidden]`: from `write`."""
        if not len(drawing.rows):
            self._model.idle_drafts(step, num_drafts)  # other ranks draft
            return

        def advance(hidden: torch.Tensor, num_passes: int) -> torch.Tensor:
            inputs = self._state.draft_inputs(drawing.rows, drawing.page_table, drawing.num_pages, num_passes)
            decode = DecodeMeta(len(drawing.rows), 1, inputs.seq_lens, drawing.max_seq_len, drawing.page_table)
            meta = AttnMetadata(inputs.positions, inputs.slots, decode, None)
            return self._model.draft(inputs.token_ids, hidden, meta, self._caches, step, written=num_passes == 0)

        for place, drafts in enumerate(propose(hidden, num_drafts, advance, self._best), 1):
            self._state.ahead[drawing.rows, place] = drafts

    def _best(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[R, hidden]` -> its likeliest tokens `[R]` int64, the same on all ranks of the TP group."""
        logits = self._model.draft_logits(hidden)
        if logits is None:
            tokens = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        else:
            tokens = logits.argmax(-1) if self._kernels is None else self._kernels.best(logits)
        return self._tp.broadcast(tokens)
