"""How many tokens to draft: a guess of tokens per second for each number, from what steps cost and what was accepted. No torch, no clock.

A step with k drafts yields 1 + p1 + p1 p2 + ... + p1..pk tokens of each sequence, where pj is how often draft j stood when those before it
did. What it costs is measured: by k and by how many sequences ran, in powers of two, since drafts are nearly free for few sequences and as
dear as any token for many. Measured first are all drafts and none; others are taken to lie on the line between their neighbours until they
get a turn. The best k may be 0. Now and then another k gets a turn, lest its figures grow old; the rarer, the longer one k has been the
best.
"""

from dataclasses import dataclass, field
from itertools import pairwise

MIN_SAMPLES = 3  # measured steps before a cost counts
NEAR = 4  # doublings of the number of sequences over which costs by k are taken to keep their proportions until they are measured
PROBE_EVERY, PROBE_SELDOM = 32, 512  # steps between turns of another k, at first and in the end
REVIEW_EVERY = 8  # steps between looks for the best, of which one is measured
PACE_STEPS = 16  # before a turn, which all are: what others cost is told by what the best costs just then
PROBE_STEPS = 3  # of one turn: the first is not measured
COST_WEIGHT, PACE_WEIGHT = 0.4, 0.3  # of a new measurement
MAX_CHANGE, MAX_OUTLIER = 1.4, 1.2  # times the known cost, of a turn's step and of others: one that was held up tells little
MEMORY = 512  # drafts after which old acceptance counts for half
STALE = 24  # drafts for which acceptance counts at most that was measured long ago: before a turn, where drafts were not made since
# Before anything is known a draft is taken to stand more often than not, or nobody would try.
PRIOR_ACCEPTED, PRIOR_DRAFTED = 3.0, 4.0


@dataclass
class _Load:
    """Steps of about so many sequences."""

    costs: list[float]  # by number of drafts, in seconds where the pace is 1; meaningless without samples
    num_samples: list[int]
    pace: float = 1.0  # how slow steps are now, whatever their drafts: as those of the best show
    best: int = 0
    calm: int = 0  # steps that take the best without another look
    wait: int = PROBE_EVERY  # steps before the next turn, without those
    interval: int = PROBE_EVERY
    num_turns: int = 0

    def known(self) -> list[int]:
        """Numbers of drafts whose cost is known."""
        return [k for k, num in enumerate(self.num_samples) if num >= MIN_SAMPLES]

    @property
    def complete(self) -> bool:
        """Whether the others can be told from what is known."""
        return min(self.num_samples[0], self.num_samples[-1]) >= MIN_SAMPLES

    def line(self) -> list[float]:
        """Costs by number of drafts of a complete load."""
        costs = list(self.costs)
        for low, high in pairwise(self.known()):
            for k in range(low + 1, high):
                costs[k] = costs[low] + (costs[high] - costs[low]) * (k - low) / (high - low)
        return costs


@dataclass
class DraftSchedule:
    """Choices of one engine. `max_drafts` is the answer unless `adaptive`."""

    max_drafts: int
    adaptive: bool = True
    _accepted: list[float] = field(init=False)  # by position
    _drafted: list[float] = field(init=False)  # by position, where all drafts before it stood
    _loads: dict[int, _Load] = field(init=False, default_factory=dict)
    _latest: int = -1  # drafts of the step that was reported last

    def __post_init__(self):
        self._accepted = [PRIOR_ACCEPTED] * self.max_drafts
        self._drafted = [PRIOR_DRAFTED] * self.max_drafts

    def observe_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """One sequence verified `num_drafted` drafts, of which the first `num_accepted` stood."""
        for position in range(min(num_drafted, num_accepted + 1)):
            self._drafted[position] += 1
            self._accepted[position] += position < num_accepted
            if self._drafted[position] > MEMORY:
                self._drafted[position] /= 2
                self._accepted[position] /= 2

    def observe_step(self, num_seqs: int, num_drafts: int, seconds: float) -> None:
        """A step that only decoded took so long, with as many drafts verified as made."""
        if not self.adaptive:
            return  # nobody will ask
        changed, self._latest = self._latest != num_drafts, num_drafts
        load = self._load(num_seqs)
        # Behind a change a step pays for it: rows are told anew, and nothing of it is in caches. Of many of the best, one tells enough.
        if changed or (load.calm and num_drafts == load.best):
            return
        if load.num_samples[num_drafts] < MIN_SAMPLES and load.complete:  # between two that are known: a better start than one step
            load.costs, load.num_samples[num_drafts] = load.line(), MIN_SAMPLES
        cost, num_samples = load.costs[num_drafts], load.num_samples[num_drafts]
        load.num_samples[num_drafts] += 1
        if num_samples < MIN_SAMPLES:
            # The first steps of a kind may be slow for reasons of their own.
            load.costs[num_drafts] = min(cost, seconds / load.pace) if num_samples else seconds / load.pace
            return
        change = seconds / (cost * load.pace)
        if num_drafts == load.best:
            load.pace *= _within(change, MAX_OUTLIER) ** PACE_WEIGHT
        else:
            load.costs[num_drafts] *= _within(change, MAX_CHANGE) ** COST_WEIGHT

    def acceptance(self) -> list[float]:
        """By position: how often a draft stands if all before it do."""
        return [accepted / drafted for accepted, drafted in zip(self._accepted, self._drafted, strict=True)]

    def tokens_per_step(self, num_drafts: int) -> float:
        """Expected tokens of one sequence."""
        expected = stands = 1.0
        for rate in self.acceptance()[:num_drafts]:
            stands *= rate
            expected += stands
        return expected

    def choose(self, num_seqs: int) -> int:
        """Drafts for a step of `num_seqs` sequences."""
        if not self.adaptive or not self.max_drafts:
            return self.max_drafts
        load = self._load(num_seqs)
        if load.calm:
            load.calm -= 1
            return load.best
        if load.wait >= 0:  # else in the middle of a turn
            costs = self._costs(num_seqs.bit_length())
            if costs is None:
                return self.max_drafts if load.num_samples[-1] < MIN_SAMPLES else 0
            best = max(range(self.max_drafts + 1), key=lambda k: self.tokens_per_step(k) / costs[k])
            if best != load.best:
                load.best, load.interval = best, PROBE_EVERY
                load.wait = min(load.wait, PROBE_EVERY)
        best = load.best
        load.wait -= 1
        if load.wait >= 0:
            if load.complete:
                load.calm = max(0, min(REVIEW_EVERY - 1, load.wait - PACE_STEPS))
                load.wait -= load.calm
            return best
        if load.wait == -1:
            self._forget(best)
        # One more or one fewer in turn: the neighbours of the best.
        others = [k for k in (best + 1, best - 1) if 0 <= k <= self.max_drafts]
        probed = others[load.num_turns % len(others)]
        if load.wait <= -PROBE_STEPS:
            load.num_turns += 1
            load.interval = min(2 * load.interval, PROBE_SELDOM)
            load.wait = load.interval
        return probed

    def _forget(self, first: int) -> None:
        """What was accepted at positions from `first` on shall count less than what is to be seen now."""
        for position in range(first, self.max_drafts):
            kept = min(1.0, STALE / self._drafted[position])
            self._drafted[position] *= kept
            self._accepted[position] *= kept

    def _costs(self, size: int) -> list[float] | None:
        """Costs by number of drafts at a load, of which some other load's may tell the proportions; None: neither is known."""
        load = self._loads[size]
        if load.complete:
            return load.line()
        near = [other for other in self._loads if self._loads[other].complete and abs(other - size) <= NEAR]
        if not near:
            return None
        costs = self._loads[min(near, key=lambda other: abs(other - size))].line()
        known = load.known()
        scale = load.costs[known[-1]] / costs[known[-1]] if known else 1.0
        return [load.costs[k] if k in known else cost * scale for k, cost in enumerate(costs)]

    def _load(self, num_seqs: int) -> _Load:
        size = num_seqs.bit_length()
        if size not in self._loads:
            self._loads[size] = _Load([0.0] * (self.max_drafts + 1), [0] * (self.max_drafts + 1))
        return self._loads[size]


def _within(change: float, most: float) -> float:
    """A factor, by `most` up or down at most."""
    return min(max(change, 1 / most), most)
