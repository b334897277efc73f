"""What transformers says about a token list, and how near it came to saying something else.

A greedy continuation is checked in one forward pass over prompt and continuation: it is transformers' own if every token of it is
the most likely one behind those before it.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Reference:
    """One prompt with its greedy continuation."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]  # of each output token
    prompt_logprobs: list[float]  # of each prompt token but the first
    token_margin: float  # least lead of an output token over the second best, in log-probability
    gate_margin: float  # least lead of a chosen expert or group over one left out, over all positions and layers, in choice score


class GateWatch:
    """Collects the gate margins of every position while a transformers model runs: `with GateWatch(model) as watch: model(...)`."""

    def __init__(self, model: Any):
        self.gates = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
        assert self.gates, "a model without gates has no gate margins"
        self.margins: list[torch.Tensor] = []  # one [num_tokens] for each gate call

    def __enter__(self) -> "GateWatch":
        self._stack = contextlib.ExitStack()
        for gate in self.gates:
            self._stack.callback(gate.register_forward_hook(self._hook).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _hook(self, gate: Any, args: tuple, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        logits, _, chosen = output
        margin, own_choice = gate_margin(gate, logits)
        # The margin speaks of transformers' choice only if it is computed by the same rule.
        clear = margin > 1e-6
        assert torch.equal(chosen.sort(-1).values[clear], own_choice.sort(-1).values[clear]), (
            "the margin follows another rule than the gate"
        )
        self.margins.append(margin)

    def smallest(self) -> torch.Tensor:
        """`[num_tokens]`: least margin of each position over the layers, of one forward pass."""
        assert len(self.margins) == len(self.gates)
        return torch.stack(self.margins).amin(0)


def gate_margin(gate: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits `[T, E]` of a transformers gate -> least lead in choice score `[T]`, chosen experts `[T, k]`."""
    bias = getattr(gate, "e_score_correction_bias", None)
    scores = logits.softmax(-1) if bias is None else logits.sigmoid() + bias
    margin = torch.full((scores.shape[0],), math.inf)
    if bias is not None or gate.topk_method == "group_limited_greedy":
        groups = scores.view(scores.shape[0], gate.num_group, -1)
        ranks = groups.amax(-1) if bias is None else groups.topk(2, dim=-1).values.sum(-1)
        ordered, order = ranks.sort(-1, descending=True)
        if gate.topk_group < gate.num_group:
            margin = ordered[:, gate.topk_group - 1] - ordered[:, gate.topk_group]
        dropped = torch.ones_like(ranks, dtype=torch.bool).scatter_(1, order[:, : gate.topk_group], False)
        scores = groups.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    ordered, order = scores.sort(-1, descending=True)
    return torch.minimum(margin, ordered[:, gate.top_k - 1] - ordered[:, gate.top_k]), order[:, : gate.top_k]


@torch.no_grad()
def refer(model: Any, prompt: list[int], output: list[int]) -> Reference:
    """One plain forward pass, no padding, no cache. AssertionError if `output` is not the greedy continuation of `prompt`."""
    tokens = torch.tensor(prompt + output)
    with GateWatch(model) as watch:
        logprobs = model(tokens[None], use_cache=False).logits[0].log_softmax(-1)
    own = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
    num_prompt = len(prompt)
    best = logprobs[num_prompt - 1 : -1].topk(2, dim=-1)
    assert best.indices[:, 0].tolist() == output, "the stored continuation is not the reference's: run find_prompts.py again"
    return Reference(
        prompt=prompt,
        output=output,
        logprobs=own[num_prompt - 1 :].tolist(),
        prompt_logprobs=own[: num_prompt - 1].tolist(),
        token_margin=float((best.values[:, 0] - best.values[:, 1]).min()),
        gate_margin=float(watch.smallest().min()),
    )
