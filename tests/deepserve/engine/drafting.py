"""Models with an MTP module, and drafts of the test's choice."""

import json
from pathlib import Path

import torch

from deepserve.engine.engine import Engine
from tests.deepserve.engine.driving import MINIMAL


def minimal_mtp_folder(folder: Path, **changes) -> str:
    """The minimal model with an MTP module."""
    (folder / "config.json").write_text(json.dumps({**MINIMAL, "num_nextn_predict_layers": 1, **changes}))
    return str(folder)


def tell_drafts(engine: Engine, tokens: list[int]) -> None:
    """From now on every draft is right, for one sequence at a time that goes like `tokens`."""
    drafter, state = engine.runner.drafter, engine.runner.state
    draft, truth = drafter.draft, torch.tensor([*tokens, *[0] * (2 + state.max_drafts)])

    def told(drawing, *rest):
        draft(drawing, *rest)
        for row in drawing.rows[drawing.rows < state.num_rows].tolist():
            num_known = int(state.lens[row])
            state.ahead[row, 1:] = truth[num_known:][: state.max_drafts] if num_known < len(tokens) else 0

    drafter.draft = told
