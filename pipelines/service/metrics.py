"""What Prometheus is told: names as vLLM's where the meaning is the same, `dflash:` before those of our own.

docs/metrics.md says what each one means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_engine.stats import EngineStats
from pipelines.cost import Price
from pipelines.service.observation import Observation
from pipelines.service.usage_record import UsageRecord

_TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_TOKEN_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_ANSWER_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536)
_ACCEPTANCE = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)


class Metrics:
    """The figures of one application, in a registry of its own. Called on its event loop only."""

    def __init__(self, model: str, price: Price | None) -> None:
        self._model = model
        self._price = price
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=registry, buckets=buckets).labels(model)

        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts, cached ones included.").labels(model)
        self._answered = counter("vllm:generation_tokens", "Tokens of answers.").labels(model)
        self._queried = counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the cache.")
        self._cached = counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.").labels(model)
        self._ended = counter("vllm:request_success", "Answers by how they ended.", "finished_reason")
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Until the first token.", _TTFT_S)
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of an answer, behind its first.", _TOKEN_S
        )
        self._duration = histogram("vllm:e2e_request_latency_seconds", "Whole answers.", _ANSWER_S)
        self._prompts = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answers = histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._acceptance = histogram(
            "dflash:acceptance_length", "Tokens of an answer per verify pass.", _ACCEPTANCE
        )
        self._busy = counter("dflash:owner_busy_seconds", "Engine time that answers caused.", "owner")
        self._cost = counter("dflash:cost_usd", "Price of that time.", "owner") if price else None
        self._requests = counter("dflash:http_requests", "Requests.", "route", "method", "status")

    def count_request(self, seen: Observation) -> None:
        """An HTTP request that is over, with what its choices used."""
        self._requests.labels(self._model, seen.route, seen.method, seen.status).inc()
        for record in seen.usages:
            self._count_answer(record)

    def _count_answer(self, record: UsageRecord) -> None:
        usage = record.usage
        self._prompt.inc(usage.prompt_tokens)
        self._queried.labels(self._model).inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._answered.inc(usage.completion_tokens)
        self._ended.labels(self._model, record.finish_reason).inc()
        self._prompts.observe(usage.prompt_tokens)
        self._answers.observe(usage.completion_tokens)
        self._duration.observe(record.duration_s)
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)
            if usage.completion_tokens > 1:
                self._per_token.observe((record.duration_s - record.ttft_s) / (usage.completion_tokens - 1))
        if usage.steps:
            self._acceptance.observe(usage.acceptance_length)
        self._busy.labels(self._model, record.owner).inc(usage.busy_s)
        if self._cost is not None and self._price is not None:
            self._cost.labels(self._model, record.owner).inc(float(self._price.cost_usd(usage.busy_ns)))

    def text(self, engines: Mapping[str, EngineStats]) -> bytes:
        """In Prometheus' text format, with the figures of the engines beside the service's own."""
        own = (_without_created(metric) for metric in self._registry.collect())
        return generate_latest(_Page([*own, *self._engine_families(engines)]))

    def _engine_families(self, engines: Mapping[str, EngineStats]) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        for figure in _engine_figures(EngineStats()):
            kind = CounterMetricFamily if figure.counts else GaugeMetricFamily
            family = kind(figure.name, figure.text, labels=labels)
            for name, stats in engines.items():
                value = next(each.value for each in _engine_figures(stats) if each.name == figure.name)
                family.add_metric([self._model, name], value)
            yield family
        if self._price is not None:
            price = GaugeMetricFamily("dflash:usd_per_hour", "Price of an engine.", labels=["model_name"])
            price.add_metric([self._model], float(self._price.usd_per_hour))
            yield price


class _Figure(NamedTuple):
    name: str
    text: str
    value: float
    counts: bool = True


def _engine_figures(stats: EngineStats) -> tuple[_Figure, ...]:
    return (
        _Figure("vllm:num_requests_running", "Requests in the rounds.", stats.running, counts=False),
        _Figure("vllm:num_requests_waiting", "Requests before them.", stats.waiting, counts=False),
        _Figure("vllm:kv_cache_usage_perc", "Share of KV blocks held.", stats.kv_usage, counts=False),
        _Figure("vllm:num_preemptions", "Requests that lost their blocks.", stats.preemptions),
        _Figure("vllm:spec_decode_num_drafts", "Passes with drafted tokens.", stats.drafts),
        _Figure("vllm:spec_decode_num_draft_tokens", "Drafted tokens verified.", stats.drafted_tokens),
        _Figure("vllm:spec_decode_num_accepted_tokens", "Those accepted.", stats.accepted_tokens),
        _Figure("dflash:computed_prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
        _Figure("dflash:engine_generation_tokens", "Tokens, batch rows' too.", stats.completion_tokens),
        _Figure("dflash:steps", "Rounds.", stats.steps),
        _Figure("dflash:busy_seconds", "Time of the rounds.", stats.busy_ns / 1e9),
        _Figure("dflash:discarded_seconds", "Part of it for nobody.", stats.discarded_ns / 1e9),
    )


class _Page(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _without_created(metric: Metric) -> Metric:
    """The times at which counters began would be as many lines again, and nobody asks for them."""
    metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    return metric
