"""What it would bring to verify a sequence's drafts only as far as the MTP module is sure of them.

    python bench/mtp_confidence.py [--exchanges 96]

Runs the shipped model on a CPU with three drafts a step, one sequence at a time, and notes the probability that the module gave to each
draft and how many stood. First: how often a draft stands by its confidence, if those before it stood. Then, for steps that cost
1 + k (draft + verify): the best fixed k, and the best rule of the kind "draft k, verify while the product of confidences is above a
threshold". Both are found in hindsight, over every k and threshold, so what the rule gains is an upper bound.
"""

import argparse
from dataclasses import dataclass
from itertools import pairwise

from mtp_cpu import jobs_of, make_engine, submit

NUM_DRAFTS = 3
EDGES = (0.0, 0.3, 0.5, 0.7, 0.9, 0.97, 1.01)
# Of a draft pass and of a verified token, in steps without drafts.
COSTS = {"few sequences": (0.03, 0.02), "one on a CPU": (0.12, 0.10), "many on a CPU": (0.15, 0.30), "bound by compute": (0.05, 0.45)}


@dataclass(frozen=True)
class Verified:
    """One step of one sequence."""

    confidences: list[float]
    num_accepted: int


def collect(traffic: str, num_jobs: int) -> list[Verified]:
    engine = make_engine(NUM_DRAFTS, False, 1, graphs=False)  # what is noted here would not be replayed
    drafter, drafts = engine.runner.drafter, engine.scheduler.drafts
    best, observe_drafts = drafter._best, drafts.observe_drafts
    confidences: list[float] = []
    steps: list[Verified] = []

    def noted_best(hidden):
        confidences.append(float(drafter._model.logits(hidden).softmax(-1).max()))
        return best(hidden)

    def noted_drafts(num_drafted: int, num_accepted: int) -> None:
        if num_drafted == NUM_DRAFTS:  # the last three are of the step's own drafts, those behind them of the next one's
            steps.append(Verified(confidences[-2 * NUM_DRAFTS : -NUM_DRAFTS], num_accepted))
        observe_drafts(num_drafted, num_accepted)

    drafter._best, drafts.observe_drafts = noted_best, noted_drafts
    for job in jobs_of(traffic, num_jobs, engine.limits.vocab_size):
        submit(engine, "0", job)
        while engine.has_work:
            engine.step()
    return steps


def print_calibration(steps: list[Verified]) -> None:
    for place in range(NUM_DRAFTS):
        reached = [(step.confidences[place], step.num_accepted > place) for step in steps if step.num_accepted >= place]
        cells = []
        for low, high in pairwise(EDGES):
            stood = [accepted for confidence, accepted in reached if low <= confidence < high]
            cells.append(f"{sum(stood) / len(stood):.2f} ({len(stood)})" if stood else "-")
        print(f"  draft {place + 1}: " + "  ".join(f"{cell:>10}" for cell in cells))


def num_verified(step: Verified, num_drafts: int, threshold: float) -> int:
    sure, num = 1.0, 0
    for confidence in step.confidences[:num_drafts]:
        sure *= confidence
        if sure < threshold:
            break
        num += 1
    return num


def speed(steps: list[Verified], num_drafts: int, threshold: float, draft: float, verify: float) -> float:
    """Tokens in the time of a step without drafts."""
    nums = [num_verified(step, num_drafts, threshold) for step in steps]
    tokens = sum(1 + min(step.num_accepted, num) for step, num in zip(steps, nums, strict=True))
    return tokens / sum(1 + num_drafts * draft + num * verify for num in nums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=96, help="of chat; of prose there are 8 openings")
    args = parser.parse_args()
    for traffic, num_jobs in (("chat", args.exchanges), ("text", 8)):
        steps = collect(traffic, num_jobs)
        print(f"{traffic}, {len(steps)} steps; share of drafts that stood (and their number) by confidence {EDGES}:")
        print_calibration(steps)
        for name, costs in COSTS.items():
            fixed = max((speed(steps, k, 0.0, *costs), k) for k in range(NUM_DRAFTS + 1))
            ruled = max((speed(steps, k, t / 20, *costs), k, t / 20) for k in range(1, NUM_DRAFTS + 1) for t in range(20))
            gain = ruled[0] / fixed[0] - 1
            rule = f"k {ruled[1]} above {ruled[2]:.2f}, {ruled[0]:.3f} ({gain:+.1%})"
            print(f"  {name}: best k {fixed[1]}, {fixed[0]:.3f} tokens; best rule {rule}")


if __name__ == "__main__":
    main()
