"""Which layers of a plan are worth their moves: predicted gain against predicted cost. Pure; NumPy only."""

from dataclasses import dataclass

import numpy as np

from eplb.pack import Layout
from eplb.plan import OTHER_NODE, SAME_NODE, Moves, Plan, move_batches


@dataclass(frozen=True)
class Costs:
    """What loads and moves cost on this hardware, measured or from its data sheet."""

    token_s: float  # one more choice of an expert of a layer's hottest rank makes a step so much longer, seconds
    expert_bytes: int  # of one expert's weights and scales
    node_bytes_per_s: float  # into one rank, from ranks of its node
    network_bytes_per_s: float  # into one rank, from other nodes


@dataclass(frozen=True)
class Decision:
    layers: np.ndarray  # [layers] bool: the ones to move
    gain_s: np.ndarray  # [layers] seconds saved until the next decision, if loads stay
    cost_s: np.ndarray  # [layers] seconds of transfers


def decide(plan: Plan, layout: Layout, costs: Costs, *, window_steps: int, horizon_steps: int, hysteresis: float) -> Decision:
    """Move a layer if what it saves within `horizon_steps` is above `hysteresis` times its cost.

    window_steps: in how many steps the loads of the plan were counted. The cost is that of the layer moved alone, with nothing to hide it:
    an upper bound.
    """
    gain_s = (plan.peak_before - plan.peak_after) / window_steps * costs.token_s * horizon_steps
    cost_s = _busiest_s(plan.moves.layer, plan.moves, len(plan.mean), layout, costs)
    return Decision(gain_s > hysteresis * cost_s, gain_s, cost_s)


def migration_s(moves: Moves, layout: Layout, costs: Costs) -> float:
    """Seconds of all transfers, with layers in batches as `eplb.migrate` moves them."""
    batches = move_batches(moves, layout)
    batch_of = {layer: index for index, batch in enumerate(batches) for layer in batch}
    step = np.array([batch_of[layer] for layer in moves.layer.tolist()], np.int64)
    return float(_busiest_s(step, moves, len(batches), layout, costs).sum())


def _busiest_s(step: np.ndarray, moves: Moves, num_steps: int, layout: Layout, costs: Costs) -> np.ndarray:
    """Seconds until the busiest rank has what moves to it in each step, `[num_steps]`; step `[num_moves]`.

    What comes from a rank's node and what comes from outside travel side by side.
    """

    def most(reach: int) -> np.ndarray:
        chosen = moves.reach == reach
        keys = step[chosen] * layout.num_ranks + moves.target[chosen] // layout.slots_per_rank
        return np.bincount(keys, minlength=num_steps * layout.num_ranks).reshape(num_steps, layout.num_ranks).max(-1)

    near, far = most(SAME_NODE) / costs.node_bytes_per_s, most(OTHER_NODE) / costs.network_bytes_per_s
    return np.maximum(near, far) * costs.expert_bytes
