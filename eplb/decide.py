"""Which layers of a plan are worth their moves: predicted gain against predicted cost. Pure; NumPy only."""

from dataclasses import dataclass

import numpy as np

from eplb.pack import Layout
from eplb.plan import OTHER_NODE, SAME_NODE, Plan


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

    window_steps: in how many steps the loads of the plan were counted. A layer's transfers run side by side on its ranks, and those from
    the node beside those from outside; layers follow each other. All of a transfer's time counts as cost, as if nothing hid it.
    """
    gain_s = (plan.peak_before - plan.peak_after) / window_steps * costs.token_s * horizon_steps
    cost_s = np.maximum(
        _most_received(plan, layout, SAME_NODE) * (costs.expert_bytes / costs.node_bytes_per_s),
        _most_received(plan, layout, OTHER_NODE) * (costs.expert_bytes / costs.network_bytes_per_s),
    )
    return Decision(gain_s > hysteresis * cost_s, gain_s, cost_s)


def _most_received(plan: Plan, layout: Layout, reach: int) -> np.ndarray:
    """Experts that come to the busiest rank of each layer from so far, `[layers]`."""
    chosen = plan.moves.reach == reach
    keys = plan.moves.layer[chosen] * layout.num_ranks + plan.moves.target[chosen] // layout.slots_per_rank
    return np.bincount(keys, minlength=len(plan.mean) * layout.num_ranks).reshape(-1, layout.num_ranks).max(-1)
