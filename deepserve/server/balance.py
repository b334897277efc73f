"""GET /eplb and its metrics: where experts are, what they got, and how evenly that falls on ranks."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from deepserve.messages import ExpertBalance
from deepserve.server.registry import Engine


def layer_balance(balance: ExpertBalance) -> dict[str, list[float]]:
    """By phase: of each layer, tokens of a rank, mean / maximum, if those that were counted fell on today's placement; 1 without any."""
    return {
        phase: [_balancedness(*layer, balance.num_ranks) for layer in zip(tokens, balance.phy2log, strict=True)]
        for phase, tokens in balance.tokens.items()
    }


def _balancedness(tokens: list[int], phy2log: list[int], num_ranks: int) -> float:
    # In plain Python: a frontend has no other use for NumPy, and importing it takes longer than starting.
    copies, slots = Counter(phy2log), len(phy2log) // num_ranks
    shares = [tokens[logical] / copies[logical] for logical in phy2log]
    ranks = [sum(shares[first : first + slots]) for first in range(0, len(shares), slots)]
    return sum(ranks) / num_ranks / max(ranks) if any(ranks) else 1.0


def expert_balance(engines: Iterable[Engine]) -> dict[str, Any]:
    """Of every instance whose experts may move, once it has looked at its loads."""
    return {"instances": [_instance(engine.instance, engine.balance) for engine in engines if engine.balance is not None]}


def _instance(name: str, balance: ExpertBalance) -> dict[str, Any]:
    even = layer_balance(balance)
    layers = [
        {
            "layer": number,
            "balancedness": {phase: even[phase][i] for phase in even},
            "tokens": {phase: balance.tokens[phase][i] for phase in even},
            "phy2log": balance.phy2log[i],
        }
        for i, number in enumerate(balance.layers)
    ]
    return {"instance": name, "num_ranks": balance.num_ranks, "num_steps": balance.num_steps, "layers": layers}
