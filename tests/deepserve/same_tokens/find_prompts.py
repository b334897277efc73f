"""Finds the prompts of test_same_tokens.py and writes prompts.json. Run by hand after a change to the models:

    python -m tests.deepserve.same_tokens.find_prompts            # all models, a few minutes on two cores
    python -m tests.deepserve.same_tokens.find_prompts v3         # one

A comparison across different numerics is fair only where nothing hangs on the last bits: every gate and every greedy choice must
be clear by more than the rounding. Among random prompts of a hundred tokens hardly one is. But attention is causal, so a prompt can be
grown: propose many continuations of a few tokens each, keep the longest part of one in which every gate is clear, go on
from there. The last piece is chosen such that the greedy continuation is clear as well.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from deepserve.model.hub import SHIPPED_FOLDER
from tests.deepserve.same_tokens.reference import GateWatch, refer
from tests.deepserve.tiny_models import KINDS, load_reference, make_tiny

DATA = Path(__file__).parent / "prompts.json"
SHIPPED = "deepserve-tiny"
MARGIN = 1.5e-3  # more than the 1e-3 that the test asks for, which computes in another order
NUM_NEW_TOKENS = 10
PIECE = 4  # tokens proposed at a time
LAST_PIECE = 2  # before the continuation, which is rarely clear to its end: many proposals must reach it
NUM_PROPOSALS = 64
TEMPERATURE = 1.5  # of proposals that the model makes: proposals that are all alike are of no use
# Groups of prompts by length; those of a group share all tokens but the last few of the shortest: more than one page of 64.
# Around 64 and 128 the prompt or its continuation crosses into a new page.
GROUPS = [[1], [2], [3], [7], [8], [31], [63], [64], [65], [127], [71, 90, 128, 150], [131, 141]]
TAIL = 2


class Grower:
    """Grows token lists of one model. The cache of a list's clear part is kept; each proposal is one row of a batch."""

    def __init__(self, model: Any, from_model: bool, seed: int):
        self.model, self.from_model = model, from_model
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab_size = model.config.vocab_size
        self.num_seen = self.num_clear = 0  # proposed positions

    def grow(self, start: list[int], length: int) -> list[int]:
        """A clear list of `length` tokens that begins with `start`."""
        tokens = list(start)
        while len(tokens) < length:
            proposals, clear, _ = self._propose(tokens, min(PIECE, length - len(tokens)))
            tokens += self._longest(proposals, clear)
        return tokens

    def finish(self, start: list[int], length: int) -> tuple[list[int], list[int]]:
        """A clear prompt of `length` tokens that begins with `start`, and its clear greedy continuation."""
        cut = max(len(start), length - LAST_PIECE)
        while True:
            head = self.grow(start, cut)
            for _ in range(20):
                proposals, clear, state = self._propose(head, length - len(head))
                rows, outputs = self._continue(clear.all(1).nonzero()[:, 0], *state)
                if len(rows):
                    return head + proposals[rows[0]].tolist(), outputs[0].tolist()

    def _longest(self, proposals: torch.Tensor, clear: torch.Tensor) -> list[int]:
        runs = clear.long().cumprod(1).sum(1)
        best = int(runs.argmax())
        return proposals[best, : runs[best]].tolist()

    @torch.no_grad()
    def _propose(self, head: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, torch.Tensor]]:
        """Proposals `[B, length]` behind `head`, which positions are clear `[B, length]`, cache and next logits."""
        cache = logits = None
        if head:
            out = self.model(torch.tensor([head]), use_cache=True)
            cache, logits = copy.deepcopy(out.past_key_values), out.logits[:, -1].expand(NUM_PROPOSALS, -1)
            cache.batch_repeat_interleave(NUM_PROPOSALS)
        columns, clear = [], []
        for _ in range(length):
            if self.from_model and logits is not None:
                column = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=self.generator)[:, 0]
            else:
                column = torch.randint(self.vocab_size, (NUM_PROPOSALS,), generator=self.generator)
            logits, cache, ok = self._step(column, cache)
            columns.append(column)
            clear.append(ok)
            self.num_seen += NUM_PROPOSALS
            self.num_clear += int(ok.sum())
        return torch.stack(columns, 1), torch.stack(clear, 1), (cache, logits)

    def _step(self, column: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any, torch.Tensor]:
        with GateWatch(self.model) as watch:
            out = self.model(column[:, None], past_key_values=cache, use_cache=True)
        return out.logits[:, -1], out.past_key_values, watch.smallest() > MARGIN

    @torch.no_grad()
    def _continue(self, rows: torch.Tensor, cache: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy continuations of those of `rows` for which all of it is clear: rows `[n]`, tokens `[n, NUM_NEW_TOKENS]`."""
        outputs = torch.empty(len(rows), 0, dtype=torch.long)
        keep = rows
        for _ in range(NUM_NEW_TOKENS):
            if not len(keep):
                break
            cache.batch_select_indices(keep)
            best = logits[keep].log_softmax(-1).topk(2, dim=-1)
            token = best.indices[:, 0]
            logits, cache, ok = self._step(token, cache)
            keep = (ok & (best.values[:, 0] - best.values[:, 1] > MARGIN)).nonzero()[:, 0]
            outputs = torch.cat((outputs, token[:, None]), dim=1)[keep]
            rows = rows[keep]
        return rows, outputs


def find(kind: str, folder: Path, seed: int) -> list[dict[str, list[int]]]:
    """Prompts and greedy continuations of one model."""
    model = load_reference(folder)
    # Random tokens are far from what the shipped model knows: it proposes for itself. A random model has no such thing.
    grower = Grower(model, from_model=kind == SHIPPED, seed=seed)
    found: dict[str, list[dict[str, list[int]]]] = {"first": [], "single": [], "other": []}
    for lengths in GROUPS:
        shared = grower.grow([], min(lengths) - TAIL) if len(lengths) > 1 else []
        for i, length in enumerate(lengths):
            prompt, output = grower.finish(shared, length)
            result = refer(model, prompt, output)
            role = "single" if len(lengths) == 1 else "other" if i else "first"
            found[role].append({"prompt": prompt, "output": output})
            print(f"{kind}: {length} tokens, token margin {result.token_margin:.4f}, gate margin {result.gate_margin:.4f}", flush=True)
    print(f"{kind}: {grower.num_clear / grower.num_seen:.3f} of the proposed positions were clear")
    # Those that share a prefix stand far apart, so that the first has left its pages when the others come in.
    return found["first"] + found["single"] + found["other"]


def main(kinds: list[str]) -> None:
    torch.set_num_threads(1)  # the matrices are too small to be worth sharing
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    with tempfile.TemporaryDirectory() as root:
        for kind in kinds:
            folder = SHIPPED_FOLDER if kind == SHIPPED else make_tiny(kind, Path(root) / kind, seed=0)
            data[kind] = {"seed": 0, "num_new_tokens": NUM_NEW_TOKENS, "cases": find(kind, folder, seed=0)}
            lines = [f'"{name}": {_dump(entry)}' for name, entry in sorted(data.items())]
            DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _dump(entry: dict[str, Any]) -> str:
    cases = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in entry["cases"])
    return f'{{"seed": {entry["seed"]}, "num_new_tokens": {entry["num_new_tokens"]}, "cases": [\n{cases}\n]}}'


if __name__ == "__main__":
    main(sys.argv[1:] or [*KINDS, SHIPPED])
