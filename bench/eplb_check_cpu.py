"""Whether the gain that bench/eplb_sim.py works out comes true where it can be run: the experts of four ranks, on this CPU.

    python bench/eplb_check_cpu.py [--windows 6] [--layers 4] [--seed 0] [--json FILE]

The simulation takes the experts' time on a rank to depend on the rows that its slots get together, and a step to wait for the busiest rank.
Here each rank's experts are computed with the rows that each of them really gets, one rank after the other (four ranks at once would share
this machine's cores, and a step would last as long as all the work, not as the busiest rank's), and timed by the CPU time of the thread.
Loads drift as in the simulation, each window is planned from the one before, rows are drawn from the loads. What is not checked: that a
step waits for its busiest rank, which is so by construction, and the price of moves.

simulated   as there: a rank's time is that of as many rows spread evenly over its slots, measured at a few sizes
measured    from the computed steps
"""

import argparse
import json
import platform
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from eplb_plan import incremental
from eplb_workload import NUM_EXPERTS, Traffic, recorded_windows

from eplb.pack import Layout
from hw.api import Dispatched, ExpertMode, ExpertRows
from hw.select import open_backend
from hw.weights import Storage
from moe.config import MoEConfig
from moe.experts import Experts

LAYOUT = Layout(NUM_EXPERTS, 4, 72)
TOP_K, TOKENS_PER_RANK, DRIFT = 8, 512, 0.05
CONFIG = MoEConfig(256, 128, NUM_EXPERTS, 0, TOP_K, "softmax", "greedy", 1, 1, False, 1.0)
CURVE = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 6.0, 12.0)  # of a rank's mean rows
PASSES = 6  # over everything that is timed; the least time of each counts, since others may use the machine


class Rank:
    """The experts of one rank; which ones they are makes no difference to their time."""

    def __init__(self):
        backend = open_backend("cpu", num_threads=1)
        storage = Storage(torch.float32, backend.runtime.device)
        self.experts = Experts(CONFIG, backend.ops, tuple(range(LAYOUT.slots_per_rank)), prefix="", storage=storage)
        for tensor in self.experts.tensors():
            tensor.normal_(std=0.05)

    @torch.inference_mode()
    def seconds(self, rows: np.ndarray) -> float:
        """CPU time of experts that get `rows` `[slots_per_rank]` each."""
        counts = torch.from_numpy(rows.astype(np.int32))
        x = torch.randn(int(rows.sum()), CONFIG.hidden_size)
        dispatched = Dispatched(ExpertMode.THROUGHPUT, x, counts, ExpertRows(rows.tolist()), None)
        began = time.thread_time()
        self.experts.forward(dispatched)
        return time.thread_time() - began


def rows_of(chosen: np.ndarray, phy2log: np.ndarray) -> np.ndarray:
    """Rows of each slot, `[ranks, slots]`: those of an expert, `[experts]` whole numbers, are taken by its copies in turn."""
    copies = np.bincount(phy2log, minlength=len(chosen))
    nth = np.array([np.count_nonzero(phy2log[:slot] == expert) for slot, expert in enumerate(phy2log)])
    share, left = np.divmod(chosen, copies)
    return (share[phy2log] + (nth < left[phy2log])).reshape(LAYOUT.num_ranks, -1)


def evenly(rows: int) -> np.ndarray:
    slots = LAYOUT.slots_per_rank
    return rows // slots + (np.arange(slots) < rows % slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng, rank = np.random.default_rng(args.seed), Rank()
    mean_rows = TOKENS_PER_RANK * TOP_K
    sizes = np.array([int(mean_rows * part) for part in CURVE])
    windows = recorded_windows(Traffic(args.windows + 2, drift=DRIFT), "decode", seed=args.seed)
    windows = [window[: args.layers] / window[: args.layers].sum(-1, keepdims=True) for window in windows]
    in_order = np.tile(np.arange(LAYOUT.num_physical) % NUM_EXPERTS, (args.layers, 1))
    current, steps = in_order, []
    for before, now in pairwise(windows):
        current = incremental(before, current, LAYOUT).phy2log
        chosen = np.stack([rng.multinomial(mean_rows * LAYOUT.num_ranks, layer) for layer in now])
        steps.append([[rows_of(*layer) for layer in zip(chosen, placement, strict=True)] for placement in (in_order, current)])
    rows = np.array(steps).swapaxes(0, 1)  # [in order or planned, windows, layers, ranks, slots]
    jobs = [*map(evenly, sizes), *rows.reshape(-1, LAYOUT.slots_per_rank)]
    least = np.min([[rank.seconds(job) for job in jobs] for _ in range(PASSES)], axis=0)
    curve, measured = least[: len(sizes)], least[len(sizes) :].reshape(rows.shape[:-1])
    found = {"simulated": np.interp(rows.sum(-1), sizes, curve), "measured": measured}
    seconds = {name: dict(zip(("in order", "planned"), t.max(-1).sum((1, 2)).tolist(), strict=True)) for name, t in found.items()}
    gains = {name: found["in order"] / found["planned"] for name, found in seconds.items()}
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one thread; 4 ranks of {LAYOUT.slots_per_rank} slots")
    off = (gains["measured"] - 1) / (gains["simulated"] - 1) - 1
    print(f"gain in the experts' time of a step: simulated {gains['simulated'] - 1:.1%}, measured {gains['measured'] - 1:.1%}")
    print(f"measured is {off:+.0%} off, {'within' if abs(off) <= 0.2 else 'NOT within'} 20 %")
    if args.json:
        curve_us = {int(size): 1e6 * at for size, at in zip(sizes, curve.tolist(), strict=True)}
        args.json.write_text(json.dumps({"gains": gains, "seconds": seconds, "even_rows_us": curve_us}, indent=1))


if __name__ == "__main__":
    main()
