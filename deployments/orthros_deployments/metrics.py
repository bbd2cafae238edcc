"""Metric values of a replica, recorded where Ray's node agents pick them up."""

from collections.abc import Iterable

from ray.serve import metrics as serve_metrics

from orthros_service.telemetry import METRICS, MetricSpec
from orthros_service.telemetry.metrics import MetricKind, closed_labels


class RayMetrics:
    """A `MetricsSink` of one replica; the node agents show its metrics as `ray_orthros_*`.

    Args:
        specs: The metrics to keep.
    """

    def __init__(self, specs: Iterable[MetricSpec] = METRICS) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._counters: dict[str, serve_metrics.Counter] = {}
        self._gauges: dict[str, serve_metrics.Gauge] = {}
        self._histograms: dict[str, serve_metrics.Histogram] = {}
        for spec in self._specs.values():
            labels = tuple(spec.labels)
            match spec.kind:
                case "counter":
                    self._counters[spec.name] = serve_metrics.Counter(
                        spec.name, description=spec.help, tag_keys=labels
                    )
                case "gauge":
                    self._gauges[spec.name] = serve_metrics.Gauge(
                        spec.name, description=spec.help, tag_keys=labels
                    )
                case "histogram":
                    self._histograms[spec.name] = serve_metrics.Histogram(
                        spec.name,
                        description=spec.help,
                        boundaries=list(spec.buckets),
                        tag_keys=labels,
                    )

    def increment(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        closed = self._closed(name, "counter", labels)
        # Ray refuses to add nothing.
        if amount > 0:
            self._counters[name].inc(amount, tags=closed)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Record one value of a histogram."""
        closed = self._closed(name, "histogram", labels)
        self._histograms[name].observe(value, tags=closed)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        closed = self._closed(name, "gauge", labels)
        self._gauges[name].set(value, tags=closed)

    def _closed(self, name: str, kind: MetricKind, labels: dict[str, str]) -> dict[str, str]:
        spec = self._specs.get(name)
        if spec is None or spec.kind != kind:
            raise ValueError(f"there is no {kind} named {name!r}; declare it in METRICS")
        return closed_labels(spec, labels)
