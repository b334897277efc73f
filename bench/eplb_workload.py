"""Expert loads with realistic skew and drift, for the programs that compare placements. Not a program of its own.

Requests belong to topics. Topics are Zipf-popular, and their popularities drift: their logarithms wander around where they started (an
Ornstein-Uhlenbeck process), so a window of traffic differs a little from the one before and much from one an hour ago. Two ways from
topics to loads of 58 layers x 256 experts, the routed part of DeepSeek-V3:

recorded   The shipped model's real routing (bench/traces/tiny_routing.npz, made by bench/eplb_record.py): each of the 8 groups of 32
           experts of a layer is one recorded layer of 32, with topics in an order of its own, and a share of the layer's load of its
           own. Windows are sums over requests drawn by topic; 40,000 short requests are some 2 million tokens, a ninth of what 144
           ranks with 128 sequences each decode in 1,000 steps, so chance plays a larger part than it would there.
synthetic  Each layer and topic has gamma-distributed affinities to experts; windows are Poisson counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TRACES = Path(__file__).parent / "traces" / "tiny_routing.npz"
NUM_LAYERS, NUM_EXPERTS, NUM_GROUPS, TOP_K = 58, 256, 8, 8
EXPERT_BYTES = 3 * 7168 * 2048 + 3 * (7168 // 128) * (2048 // 128) * 4  # FP8 weights and the fp32 scales of 128 x 128 blocks


@dataclass(frozen=True)
class Traffic:
    """How topics are mixed and how fast the mix changes, window by window."""

    num_windows: int = 24
    zipf: float = 1.0  # popularity of the n-th topic is n ** -zipf
    drift: float = 0.05  # standard deviation of a log popularity's step
    memory: float = 0.98  # of its distance from where it started, what a window keeps

    def mixes(self, num_topics: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Popularities `[num_topics]`, summing to 1, of each window."""
        start = -self.zipf * np.log(np.arange(1, num_topics + 1))
        # Begin somewhere in the stationary distribution, not at the start.
        spread = self.drift / np.sqrt(1 - self.memory**2)
        offset = spread * rng.standard_normal(num_topics)
        for _ in range(self.num_windows):
            weights = np.exp(start + offset)
            yield weights / weights.sum()
            offset = self.memory * offset + self.drift * rng.standard_normal(num_topics)


@dataclass(frozen=True)
class Recorded:
    names: list[str]  # of the topics
    topic: np.ndarray  # [requests]
    prefill: np.ndarray  # [requests, layers, experts] choices
    decode: np.ndarray

    @classmethod
    def load(cls, path: Path = TRACES) -> "Recorded":
        with np.load(path) as file:
            return cls(file["names"].tolist(), file["topic"], file["prefill"].astype(np.int64), file["decode"].astype(np.int64))


def recorded_windows(traffic: Traffic, phase: str, *, requests: int = 40_000, seed: int = 0) -> list[np.ndarray]:
    """Loads `[58, 256]` of each window of `requests`; phase is "prefill" or "decode"."""
    rng, data = np.random.default_rng(seed), Recorded.load()
    num_topics, counts = len(data.names), getattr(data, phase)
    order = np.argsort(rng.random((NUM_LAYERS * NUM_GROUPS, num_topics)), -1)  # topic of the trace that plays each topic of the traffic
    source = rng.integers(counts.shape[1], size=NUM_LAYERS * NUM_GROUPS)
    experts = np.argsort(rng.random((NUM_LAYERS * NUM_GROUPS, counts.shape[2])), -1)
    share = np.exp(0.2 * rng.standard_normal((NUM_LAYERS, NUM_GROUPS, 1)))
    windows = []
    for mix in traffic.mixes(num_topics, rng):
        drawn = rng.multinomial(requests, mix)
        by_topic = np.empty((num_topics, num_topics, *counts.shape[1:]))  # [topic of the traffic, of the trace, layer, expert]
        for played in range(num_topics):
            mine = counts[data.topic == played]
            times = rng.multinomial(drawn, np.full(len(mine), 1 / len(mine)))  # [traffic topics, requests]
            by_topic[:, played] = np.tensordot(times, mine, 1)
        tiles = by_topic[np.arange(num_topics)[:, None], order.T, source].sum(0)  # [tiles, 32]
        tiles = np.take_along_axis(tiles, experts, -1).reshape(NUM_LAYERS, NUM_GROUPS, -1)
        windows.append((tiles / tiles.sum(-1, keepdims=True) * share).reshape(NUM_LAYERS, NUM_EXPERTS))
    return windows


def synthetic_windows(
    traffic: Traffic, *, num_topics: int = 32, shape: float = 0.5, tokens: int = 10**6, seed: int = 0
) -> list[np.ndarray]:
    """Loads `[58, 256]` of each window of `tokens`; a smaller gamma `shape` is more skewed."""
    rng = np.random.default_rng(seed)
    affinity = rng.gamma(shape, size=(num_topics, NUM_LAYERS, NUM_EXPERTS))
    affinity *= TOP_K / affinity.sum(-1, keepdims=True)
    return [rng.poisson(tokens * np.tensordot(mix, affinity, 1)).astype(np.float64) for mix in traffic.mixes(num_topics, rng)]
