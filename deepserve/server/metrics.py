"""GET /metrics: the counts of `stats` and the engines' reports, under the names that dashboards for vLLM read."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deepserve.server.balance import layer_balance
from deepserve.server.client import EngineClient
from deepserve.server.state import ServerState

_LABELS = ("model_name", "engine")

_GAUGES = (
    ("num_requests_running", "Sequences in the engine's batch.", lambda load: load.num_running),
    ("num_requests_waiting", "Sequences waiting for room.", lambda load: load.num_waiting),
    (
        "spec_decode_mean_acceptance_length",
        "Tokens that a sequence came to in a step that verified drafts, on average since start.",
        lambda load: 1 + load.num_accepted_tokens / (load.num_drafts or 1),
    ),
    (
        "kv_cache_usage_perc",
        "Share of pages held by running sequences; 1 is all.",
        lambda load: load.num_held_pages / (load.num_pages or 1),
    ),
)
_PAGES = {
    "free": lambda load: load.num_pages - load.num_held_pages - load.num_cached_pages,
    "cached": lambda load: load.num_cached_pages,
    "held": lambda load: load.num_held_pages - load.num_transfer_pages - load.num_quarantined_pages,
    "in_transfer": lambda load: load.num_transfer_pages,
    "quarantined": lambda load: load.num_quarantined_pages,
}
_LOAD_COUNTERS = (
    ("num_preemptions", "Sequences that gave their pages back to others.", lambda load: load.num_preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda load: load.num_prefix_queried_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda load: load.num_prefix_hit_tokens),
    ("spec_decode_num_drafts", "Times that a sequence had drafted tokens verified.", lambda load: load.num_drafts),
    ("spec_decode_num_draft_tokens", "Drafted tokens that were verified.", lambda load: load.num_draft_tokens),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that stood.", lambda load: load.num_accepted_tokens),
    ("eplb_moved_experts", "Experts that the balancer brought to another rank.", lambda load: load.num_moved_experts),
)
_STATS_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of requests that were computed.", lambda stats: stats.num_prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda stats: stats.num_generated_tokens),
    ("deepserve:requests_retried", "Requests that failed before anything came back, sent elsewhere.", lambda stats: stats.num_retried),
)
_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "From submission to the first token.", lambda stats: stats.first_token_s),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", lambda stats: stats.inter_token_s),
    ("vllm:e2e_request_latency_seconds", "From submission to the end of a sequence.", lambda stats: stats.end_to_end_s),
    ("vllm:request_prompt_tokens", "Prompt tokens of a request.", lambda stats: stats.prompt_tokens),
    ("vllm:request_generation_tokens", "Tokens generated for a sequence.", lambda stats: stats.generated_tokens),
    ("deepserve:hand_off_seconds", "From asking a decode rank for pages to the first token from there.", lambda stats: stats.hand_off_s),
)


class EngineCollector(Collector):
    """Reads plain numbers when scraped; nothing is done per token."""

    def __init__(self, client: EngineClient, model_name: str):
        self._client = client
        self._model = model_name

    def collect(self) -> Iterable[Metric]:
        engines = list(self._client.engines.values())
        for name, text, value in _GAUGES:
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for engine in engines:
                family.add_metric((self._model, engine.label), value(engine.load))
            yield family
        family = GaugeMetricFamily("deepserve:kv_cache_pages", "Pages of the cache, by state.", labels=(*_LABELS, "state"))
        for engine in engines:
            for state, count in _PAGES.items():
                family.add_metric((self._model, engine.label, state), count(engine.load))
        yield family
        for name, text, value in _LOAD_COUNTERS:
            family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for engine in engines:
                family.add_metric((self._model, engine.label), value(engine.load))
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens that stood, by place.", labels=(*_LABELS, "position")
        )
        for engine in engines:
            for position, count in enumerate(engine.load.num_accepted_by_position):
                family.add_metric((self._model, engine.label, str(position)), count)
        yield family
        family = GaugeMetricFamily(
            "deepserve:expert_balancedness", "Tokens by rank, mean / maximum, at the last look.", labels=(*_LABELS, "layer", "phase")
        )
        for engine in engines:
            if engine.balance is not None:
                for phase, layers in layer_balance(engine.balance).items():
                    for number, value in zip(engine.balance.layers, layers, strict=True):
                        family.add_metric((self._model, engine.label, str(number), phase), value)
        yield family
        yield from self._from_stats()

    def _from_stats(self) -> Iterable[Metric]:
        stats = self._client.stats.items()
        for name, text, value in _STATS_COUNTERS:
            family = CounterMetricFamily(name, text, labels=_LABELS)
            for label, each in stats:
                family.add_metric((self._model, label), value(each))
            yield family
        finished = CounterMetricFamily("vllm:request_success", "Sequences finished, by reason.", labels=(*_LABELS, "finished_reason"))
        for label, each in stats:
            for reason, count in each.num_finished.items():
                finished.add_metric((self._model, label, reason), count)
        yield finished
        hand_offs = CounterMetricFamily("deepserve:hand_offs", "Hand-offs to a decode rank, by result.", labels=(*_LABELS, "result"))
        for label, each in stats:
            for result, count in each.num_hand_offs.items():
                hand_offs.add_metric((self._model, label, result), count)
        yield hand_offs
        for name, text, histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=_LABELS)
            for label, each in stats:
                family.add_metric((self._model, label), histogram(each).buckets(), histogram(each).total)
            yield family


def exposition(state: ServerState) -> bytes:
    registry = CollectorRegistry()
    registry.register(EngineCollector(state.client, state.model_names[0]))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
