"""Metrics in Prometheus' format, under the names of vLLM's that dashboards know."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from whet.serve.limits import Limits
from whet.serve.loop import EngineLoop, Ticket
from whet.serve.model import ServedModel

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server.

    Args:
        model: the served model.
        loop: the engine's loop.
        limits: counts the open requests.
    """

    def __init__(self, model: ServedModel, loop: EngineLoop, limits: Limits) -> None:
        self._registry = registry = CollectorRegistry()
        label = {"labelnames": ["model_name"], "registry": registry}

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, **label).labels(model.name)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"vllm:{name}", text, buckets=_SECONDS, **label).labels(model.name)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, **label).labels(model.name)

        gauge("num_requests_running", "Requests with a first token").set_function(
            lambda: limits.n_open - loop.n_waiting()
        )
        gauge("num_requests_waiting", "Requests without a first token").set_function(loop.n_waiting)
        gauge("kv_cache_usage_perc", "Share of the KV cache in use, from 0 to 1").set_function(lambda: _kv_usage(model))
        self._prompt = counter("prompt_tokens", "Prompt tokens")
        self._sampled = counter("generation_tokens", "Sampled tokens")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._first = histogram("time_to_first_token_seconds", "Time from a request to its first token")
        self._whole = histogram("e2e_request_latency_seconds", "Time of a request")
        self._each = histogram("request_time_per_output_token_seconds", "Time of a request per token after the first")
        self._ended = Counter(
            "vllm:request_success", "Complete requests", ["model_name", "finished_reason"], registry=registry
        )
        self._name = model.name

    def add_tokens(self, n: int) -> None:
        """Count sampled tokens."""
        self._sampled.inc(n)

    def end(self, ticket: Ticket, n_prompt: int, n_cached: int, n_sampled: int, reasons: list[str]) -> None:
        """Count a complete request."""
        now = time.perf_counter()
        self._prompt.inc(n_prompt)
        self._queries.inc(n_prompt)
        self._hits.inc(n_cached)
        self._first.observe(ticket.started_s - ticket.submitted_s)
        self._whole.observe(now - ticket.submitted_s)
        if n_sampled > 1:
            self._each.observe((now - ticket.started_s) / (n_sampled - 1))
        for reason in reasons:
            self._ended.labels(self._name, reason).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _kv_usage(model: ServedModel) -> float:
    memory = model.engine.memory
    return memory["kv_used_bytes"] / memory["kv_bytes"]
