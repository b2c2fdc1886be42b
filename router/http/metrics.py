"""Prometheus metrics of the router, under the names that MindIE uses. Counts and formats; decides nothing.

All metrics belong to a registry that is passed in. Under gunicorn every worker counts into its own files in
PROMETHEUS_MULTIPROC_DIR, and any worker answers for all. The prometheus client reads that variable on import, so it
must be set before. Each model's metrics have the label `model_name`.
"""

from collections.abc import Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.multiprocess import MultiProcessCollector

from kvferry.router.api import EndEvent, ServiceCounts

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_LABEL = ("model_name",)
_GaugeMode = Literal["livesum", "livemostrecent"]
"""How the values of several workers are combined."""
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TPOT_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class RouterMetrics:
    """All metrics of `/metrics`. Methods are cheap and never wait."""

    def __init__(self, registry: CollectorRegistry, multiprocess_dir: str = "") -> None:
        self._registry = registry
        self._multiprocess_dir = multiprocess_dir
        self._received = self._counter("request_received_total", "Requests for a known model")
        self._success = self._counter("request_success_total", "Requests served to their end")
        self._failed = self._counter("request_failed_total", "Requests that ended otherwise")
        self._prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of ended generations")
        self._generated = self._counter("generation_tokens_total", "Generated tokens")
        self._retries = self._counter("request_retries_total", "Placements of ended generations beyond the first")
        self._running = self._gauge("num_requests_running", "Requests that have received a token", "livesum")
        self._waiting = self._gauge("num_requests_waiting", "Requests without a token yet", "livesum")
        self._ttft = self._histogram("time_to_first_token_seconds", "From request to first token", _TTFT_BUCKETS_S)
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "A request's mean time per token after the first", _TPOT_BUCKETS_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From request to last token", _E2E_BUCKETS_S)
        # Nodes report the same to every worker, so these must not be summed: the newest value counts.
        newest: _GaugeMode = "livemostrecent"
        self._cache_usage = self._gauge("npu_cache_usage_perc", "Used share of the decode nodes' KV blocks", newest)
        self._hit_rate = self._gauge("npu_prefix_cache_hit_rate", "Share of prompt tokens found in the cache", newest)
        self._preemptions = self._gauge("num_preemptions_total", "Requests that decode nodes preempted", newest)
        self._swaps = self._gauge("num_swaps_total", "Times that a request's KV was swapped to host memory", newest)

    def received(self, model: str) -> None:
        """Count a request for `model`; it may still prove invalid."""
        self._received.labels(model).inc()

    def ended(self, model: str, *, success: bool) -> None:
        """Count the end of a received request."""
        (self._success if success else self._failed).labels(model).inc()

    def submitted(self, model: str) -> None:
        """A valid request was accepted and waits for its first token."""
        self._waiting.labels(model).inc()

    def first_token(self, model: str, after_s: float) -> None:
        """The first token of a submitted request arrived, `after_s` after the request."""
        self._waiting.labels(model).dec()
        self._running.labels(model).inc()
        self._ttft.labels(model).observe(after_s)

    def generation_over(self, model: str, *, had_tokens: bool) -> None:
        """A submitted request will receive no more tokens."""
        (self._running if had_tokens else self._waiting).labels(model).dec()

    def generated(self, model: str, end: EndEvent, total_s: float, decode_s: float) -> None:
        """Count tokens and placements of an ended generation; `decode_s` is from its first token to its last."""
        usage = end.usage
        self._retries.labels(model).inc(max(0, end.attempts - 1))
        self._prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._generated.labels(model).inc(usage.completion_tokens)
        self._e2e.labels(model).observe(total_s)
        if usage.completion_tokens > 1:
            self._tpot.labels(model).observe(decode_s / (usage.completion_tokens - 1))

    def observe_service(self, models: tuple[str, ...], counts: ServiceCounts) -> None:
        """Copy what the nodes report. A model without a report shows 0."""
        for model in models:
            self._cache_usage.labels(model).set(counts.cache_usage.get(model, 0.0))
            self._hit_rate.labels(model).set(counts.prefix_hit_rate.get(model, 0.0))
            self._preemptions.labels(model).set(counts.preemptions.get(model, 0))
            self._swaps.labels(model).set(counts.swaps.get(model, 0))
            for gauge in (self._running, self._waiting):
                gauge.labels(model)
            for counter in (
                self._received, self._success, self._failed, self._prompt_tokens, self._generated, self._retries,
            ):  # fmt: skip
                counter.labels(model)
            for histogram in (self._ttft, self._tpot, self._e2e):
                histogram.labels(model)

    @property
    def reads_files(self) -> bool:
        """Whether `render` reads files of every worker: it must not run on the event loop then."""
        return bool(self._multiprocess_dir)

    def render(self) -> bytes:
        """The text of `/metrics`: for this process, or for all workers in multiprocess mode."""
        if not self._multiprocess_dir:
            return generate_latest(self._registry)
        merged = CollectorRegistry()
        MultiProcessCollector(merged, path=self._multiprocess_dir)  # type: ignore[no-untyped-call]
        return generate_latest(merged)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABEL, registry=self._registry)

    def _gauge(self, name: str, text: str, mode: _GaugeMode) -> Gauge:
        return Gauge(name, text, _LABEL, registry=self._registry, multiprocess_mode=mode)

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABEL, registry=self._registry, buckets=buckets_s)


def metrics_from_environment(environ: Mapping[str, str], registry: CollectorRegistry) -> RouterMetrics:
    """Metrics in multiprocess mode if `environ` names a directory for it, else of this process only."""
    return RouterMetrics(registry, environ.get(MULTIPROCESS_VARIABLE, ""))
