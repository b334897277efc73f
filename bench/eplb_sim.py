"""What balancing experts would gain: step times of large instances, simulated from measured kernels and drifting loads.

    python bench/eplb_sim.py [--windows 24] [--seed 0] [--json FILE]

No cluster was used. The step of an instance is taken to be

    rest + sum over MoE layers of the experts' time on the layer's busiest rank

experts    measured on one H200 (bench/results/expert_rows_h200.json), a function of the rows that a rank's slots get together
rest       decode: the measured step of V3's slice (128 sequences a rank, 4,096 tokens of context) less its 8 experts, plus dispatch and
           combine of each layer as measured between two GPUs, 70 us. Prefill: the slice's rate, less its experts; communication hidden.
loads      windows of bench/eplb_workload.py ("recorded", medium drift); every step of a window has the window's load, spread over copies
           evenly. What differs from step to step would add to both sides.
moves      every second counts as lost, as if nothing hid it; layers in batches, as eplb/migrate.py moves them. Into a rank: 300 GB/s
           from its node (NVLink), 40 GB/s from others (one 400 Gb/s card). Assumed, not measured.

Policies: "in order" never moves; "DeepSeek's" packs anew each window; "incremental" follows each plan; "lazy" moves the layers that
`eplb.decide` finds worth it. Each plans from the window before. "perfect" is a load spread evenly at no cost.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from eplb_plan import from_scratch, incremental
from eplb_workload import EXPERT_BYTES, NUM_EXPERTS, NUM_GROUPS, NUM_LAYERS, TOP_K, Traffic, recorded_windows

from eplb.decide import Costs, decide, migration_s
from eplb.pack import Layout
from eplb.plan import Plan, rank_loads

RESULTS = Path(__file__).parent / "results"
DISPATCH_COMBINE_S, NODE_RATE, NETWORK_RATE = 70e-6, 300e9, 40e9
HYSTERESIS, DRIFT = 2.0, 0.05


@dataclass(frozen=True)
class Instance:
    name: str
    phase: str
    layout: Layout
    tokens_per_rank: int  # of a step
    window_steps: int
    rest_s: float


class ExpertTime:
    """Seconds of a rank's experts in a layer by the rows of all its slots, between measured points; beyond, the last slope goes on."""

    def __init__(self, layout: str, slots: int | None):
        """slots: None takes the points of any number."""
        rows = json.loads((RESULTS / "expert_rows_h200.json").read_text())["rows"]
        mine = sorted((row["rows"] * row["slots"], row["us"]) for row in rows if row["layout"] == layout and slots in (None, row["slots"]))
        self.rows, self.seconds = np.array(mine).T * [[1.0], [1e-6]]

    def __call__(self, rows: np.ndarray | float) -> np.ndarray:
        beyond = np.zeros_like(rows)
        if len(self.rows) > 1:
            beyond = np.maximum(rows - self.rows[-1], 0) * (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return np.interp(rows, self.rows, self.seconds) + beyond

    def slope(self, rank_rows: float) -> float:
        """Seconds for one more row of the rank, from there to half as many again."""
        return float(self(rank_rows * 1.5) - self(rank_rows)) / (rank_rows * 0.5)


def experts_of(layout: Layout, phase: str) -> ExpertTime:
    return ExpertTime("masked", layout.slots_per_rank) if phase == "decode" else ExpertTime("contiguous", None)


@dataclass(frozen=True)
class Outcome:
    step_ms: float  # mean
    moving_ms: float  # by step
    moved_gb: float  # by window

    @property
    def total_ms(self) -> float:
        return self.step_ms + self.moving_ms


def instances() -> list[Instance]:
    decode = {row["num_seqs"]: row["step_ms"] for row in json.loads((RESULTS / "gpu_decode_slice_h200.json").read_text())["rows"]}
    prefill = json.loads((RESULTS / "gpu_prefill_slice_h200.json").read_text())
    decode_rest = decode[128] * 1e-3 - NUM_LAYERS * (float(ExpertTime("masked", 8)(8 * 128.0)) - DISPATCH_COMBINE_S)
    tokens = 4096
    prefill_rest = tokens / prefill["steady_tokens_per_s"] - NUM_LAYERS * float(ExpertTime("contiguous", None)(8.0 * tokens))
    return [
        Instance("prefill, 32 ranks x 9", "prefill", Layout(NUM_EXPERTS, 32, 9, 4, NUM_GROUPS), tokens, 300, prefill_rest),
        Instance("decode, 144 ranks x 2", "decode", Layout(NUM_EXPERTS, 144, 2, 18, NUM_GROUPS), 128, 3000, decode_rest),
        Instance("decode, 320 ranks x 1", "decode", Layout(NUM_EXPERTS, 320, 1, 40, NUM_GROUPS), 128, 3000, decode_rest),
    ]


def costs_of(instance: Instance, experts: ExpertTime) -> Costs:
    return Costs(experts.slope(instance.tokens_per_rank * TOP_K), EXPERT_BYTES, NODE_RATE, NETWORK_RATE)


def follow(instance: Instance, windows: list[np.ndarray], planner: Callable[..., Plan] | None, *, lazy: bool = False) -> Outcome:
    layout, experts = instance.layout, experts_of(instance.layout, instance.phase)
    costs = costs_of(instance, experts)
    current = np.tile(np.arange(layout.num_physical) % layout.num_logical, (NUM_LAYERS, 1))
    steps, moving, moved = [], [], []
    for index, (before, now) in enumerate(pairwise(windows)):
        lost, remote = 0.0, 0
        if planner is not None:
            plan = planner(before * instance.window_steps, current, layout)
            if lazy:
                steps_each = {"window_steps": instance.window_steps, "horizon_steps": instance.window_steps}
                plan = plan.only(decide(plan, layout, costs, **steps_each, hysteresis=HYSTERESIS).layers, current)
            lost = migration_s(plan.moves, layout, costs)
            current, remote = plan.phy2log, plan.moves.num_remote
        peak = rank_loads(now, current, layout.num_ranks).max(-1)
        if index:  # the first plan starts from experts in order; it is no steady state
            steps.append(instance.rest_s + experts(peak).sum())
            moving.append(lost / instance.window_steps)
            moved.append(remote * EXPERT_BYTES)
    return Outcome(float(np.mean(steps) * 1e3), float(np.mean(moving) * 1e3), float(np.mean(moved) / 1e9))


def simulate(instance: Instance, num_windows: int, seed: int) -> dict[str, Outcome]:
    choices = instance.layout.num_ranks * instance.tokens_per_rank * TOP_K  # of a layer in a step
    windows = recorded_windows(Traffic(num_windows + 2, drift=DRIFT), instance.phase, seed=seed)
    windows = [window / window.sum(-1, keepdims=True) * choices for window in windows]
    experts = experts_of(instance.layout, instance.phase)
    perfect = instance.rest_s + NUM_LAYERS * float(experts(choices / instance.layout.num_ranks))
    return {
        "in order": follow(instance, windows, None),
        "DeepSeek's": follow(instance, windows, from_scratch),
        "incremental": follow(instance, windows, incremental),
        "lazy": follow(instance, windows, incremental, lazy=True),
        "perfect": Outcome(perfect * 1e3, 0.0, 0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    records = []
    print("instance                 policy         step, ms   moving, ms/step   moved, GB/window   throughput, in order = 1")
    for instance in instances():
        outcomes = simulate(instance, args.windows, args.seed)
        for policy, got in outcomes.items():
            gain = outcomes["in order"].total_ms / got.total_ms
            print(f"{instance.name:24} {policy:12} {got.step_ms:10.2f} {got.moving_ms:17.3f} {got.moved_gb:18.1f} {gain:26.3f}")
            records.append({"instance": instance.name, "policy": policy, "throughput": gain, **asdict(got)})
    if args.json:
        args.json.write_text(json.dumps({"windows": args.windows, "seed": args.seed, "rows": records}, indent=1))


if __name__ == "__main__":
    main()
