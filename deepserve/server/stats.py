"""Numbers of one engine rank as this frontend sees them; plain integers, so that counting costs the token path next to nothing."""

from bisect import bisect_left
from itertools import accumulate

# The bucket edges that dashboards made for vLLM expect.
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
END_TO_END_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
FINISH_REASONS = ("stop", "length", "abort", "error")
HAND_OFF_RESULTS = ("taken", "given_up")


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one is +Inf
        self.total = 0.0

    def observe(self, value: float, times: int = 1):
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts with the upper bound as text, as Prometheus wants them."""
        names = [str(float(bound)) for bound in self.bounds] + ["+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class EngineStats:
    """Counts of the sequences that one engine rank ran for this frontend; the histograms add up to the counters when all is idle."""

    def __init__(self):
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self.num_retried = 0  # requests that failed here before anything came back, and were sent elsewhere
        self.num_hand_offs = dict.fromkeys(HAND_OFF_RESULTS, 0)  # to this rank
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.hand_off_s = Histogram(FIRST_TOKEN_S)
        self.inter_token_s = Histogram(INTER_TOKEN_S)
        self.end_to_end_s = Histogram(END_TO_END_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.generated_tokens = Histogram(TOKENS)
