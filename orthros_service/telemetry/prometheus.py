"""Metrics of one process, in its own Prometheus registry."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from orthros_service.telemetry.metrics import METRICS, MetricKind, MetricSpec, closed_labels

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusMetrics:
    """A `MetricsSink` that keeps its values in this process.

    Args:
        specs: The metrics to keep.
    """

    def __init__(self, specs: Iterable[MetricSpec] = METRICS) -> None:
        self._registry = CollectorRegistry()
        self._specs = {spec.name: spec for spec in specs}
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for spec in self._specs.values():
            self._register(spec)

    def _register(self, spec: MetricSpec) -> None:
        labels = tuple(spec.labels)
        match spec.kind:
            case "counter":
                self._counters[spec.name] = Counter(
                    spec.name, spec.help, labels, registry=self._registry
                )
            case "gauge":
                self._gauges[spec.name] = Gauge(
                    spec.name, spec.help, labels, registry=self._registry
                )
            case "histogram":
                self._histograms[spec.name] = Histogram(
                    spec.name, spec.help, labels, buckets=spec.buckets, registry=self._registry
                )

    def increment(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        closed = self._closed(name, "counter", labels)
        metric = self._counters[name]
        (metric.labels(**closed) if closed else metric).inc(amount)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Record one value of a histogram."""
        closed = self._closed(name, "histogram", labels)
        metric = self._histograms[name]
        (metric.labels(**closed) if closed else metric).observe(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        closed = self._closed(name, "gauge", labels)
        metric = self._gauges[name]
        (metric.labels(**closed) if closed else metric).set(value)

    def render(self) -> str:
        """Return all values in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def _closed(self, name: str, kind: MetricKind, labels: dict[str, str]) -> dict[str, str]:
        spec = self._specs.get(name)
        if spec is None or spec.kind != kind:
            raise ValueError(f"there is no {kind} named {name!r}; declare it in METRICS")
        return closed_labels(spec, labels)
