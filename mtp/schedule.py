"""How many tokens to draft: a guess of tokens per second for each number, from what steps cost and what was accepted. No torch, no clock.

A step with k drafts yields 1 + p1 + p1 p2 + ... + p1..pk tokens of each sequence, where pj is how often draft j stood when those before it
did. What it costs is measured: by k and by how many sequences ran, in powers of two, since drafts are nearly free for few sequences and as
dear as any token for many. The best k may be 0. Now and then another k gets a turn, lest its figures grow old; the rarer, the longer one
k has been the best.
"""

from dataclasses import dataclass, field

MIN_SAMPLES = 3  # measured steps before a cost counts
NEAR = 2  # doublings of the number of sequences over which costs by k are taken to keep their proportions until they are measured
PROBE_EVERY, PROBE_SELDOM = 32, 256  # steps between turns of another k, at first and in the end
PROBE_STEPS = 2  # of one turn: drafts of the first are verified in the second
COST_WEIGHT = 0.1  # of a new measurement
MAX_OUTLIER = 1.5  # times the known cost: a step that was held up tells little
MEMORY = 1024  # drafts after which old acceptance counts for half
# Before anything is known a draft is taken to stand more often than not, or nobody would try.
PRIOR_ACCEPTED, PRIOR_DRAFTED = 3.0, 4.0


@dataclass
class _Load:
    """Steps of about so many sequences."""

    costs: list[float]  # seconds by number of drafts; meaningless without samples
    num_samples: list[int]
    best: int = 0
    wait: int = PROBE_EVERY  # steps before the next turn
    interval: int = PROBE_EVERY
    num_turns: int = 0


@dataclass
class DraftSchedule:
    """Choices of one engine. `max_drafts` is the answer unless `adaptive`."""

    max_drafts: int
    adaptive: bool = True
    _accepted: list[float] = field(init=False)  # by position
    _drafted: list[float] = field(init=False)  # by position, where all drafts before it stood
    _loads: dict[int, _Load] = field(init=False, default_factory=dict)

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
        load = self._load(num_seqs)
        cost, num_samples = load.costs[num_drafts], load.num_samples[num_drafts]
        if num_samples < MIN_SAMPLES:
            # The first steps of a kind may be slow for reasons of their own.
            load.costs[num_drafts] = min(cost, seconds) if num_samples else seconds
        else:
            updated = cost + COST_WEIGHT * (min(seconds, MAX_OUTLIER * cost) - cost)
            if num_drafts == load.best:
                # A machine that has become slower or faster is so for all: what was measured long ago keeps its proportion.
                load.costs = [known * updated / cost for known in load.costs]
            else:
                load.costs[num_drafts] = updated
        load.num_samples[num_drafts] += 1

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
        guide = self._guide(num_seqs.bit_length())
        known = [k for k, num in enumerate(load.num_samples) if num >= MIN_SAMPLES]
        if guide is None or not known:
            tried = range(self.max_drafts, -1, -1) if guide is None else [guide.best]
            for num_drafts in tried:
                if num_drafts not in known:
                    return num_drafts
        costs = load.costs
        if guide is not None:
            scale = costs[known[-1]] / guide.costs[known[-1]]
            costs = [costs[k] if k in known else guide.costs[k] * scale for k in range(self.max_drafts + 1)]
        best = max(range(self.max_drafts + 1), key=lambda k: self.tokens_per_step(k) / costs[k])
        if best != load.best:
            load.best, load.interval = best, PROBE_EVERY
            load.wait = min(load.wait, PROBE_EVERY)
        load.wait -= 1
        if load.wait >= 0:
            return best
        # One more or one fewer in turn: the neighbours of the best.
        others = [k for k in (best + 1, best - 1) if 0 <= k <= self.max_drafts]
        probed = others[load.num_turns % len(others)]
        if load.wait <= -PROBE_STEPS:
            load.num_turns += 1
            load.interval = min(2 * load.interval, PROBE_SELDOM)
            load.wait = load.interval
        return probed

    def _guide(self, size: int) -> _Load | None:
        """The nearest load whose costs are all measured, if one is near."""
        complete = [other for other, load in self._loads.items() if min(load.num_samples) >= MIN_SAMPLES and abs(other - size) <= NEAR]
        return self._loads[min(complete, key=lambda other: abs(other - size))] if complete else None

    def _load(self, num_seqs: int) -> _Load:
        size = num_seqs.bit_length()
        if size not in self._loads:
            self._loads[size] = _Load([0.0] * (self.max_drafts + 1), [0] * (self.max_drafts + 1))
        return self._loads[size]
