"""Metric values of one replica: exact ones for our `/metrics`, and a copy for Ray's node agents.

The agents add up histograms from the middles of their buckets, so their sums are rough, and they
are seconds behind; but Prometheus can scrape them on clusters of any size.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ray.serve import get_replica_context
from ray.serve.metrics import Counter, Gauge, Histogram

from orthros_service.telemetry import METRICS, MetricSpec, PrometheusMetrics
from orthros_service.telemetry.metrics import closed_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPage:
    """The metrics of one replica.

    Args:
        deployment: The replica's deployment.
        replica: Its id within the deployment.
        recorded: The metrics that it has recorded; others have no value here.
        text: Its values in Prometheus' text format.
    """

    deployment: str
    replica: str
    recorded: frozenset[str]
    text: str


class ReplicaMetrics:
    """A `MetricsSink` of one replica.

    Args:
        specs: The metrics to keep.
    """

    def __init__(self, specs: Iterable[MetricSpec] = METRICS) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._exact = PrometheusMetrics(self._specs.values())
        self._recorded: set[str] = set()
        self._shared: dict[str, Counter | Gauge | Histogram] = {
            spec.name: _shared_metric(spec) for spec in self._specs.values()
        }

    def increment(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        self._exact.increment(name, amount, **labels)
        self._recorded.add(name)
        shared = self._shared[name]
        # Ray refuses to add nothing.
        if isinstance(shared, Counter) and amount > 0:
            shared.inc(amount, tags=closed_labels(self._specs[name], labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Record one value of a histogram."""
        self._exact.observe(name, value, **labels)
        self._recorded.add(name)
        shared = self._shared[name]
        if isinstance(shared, Histogram):
            shared.observe(value, tags=closed_labels(self._specs[name], labels))

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._exact.set(name, value, **labels)
        self._recorded.add(name)
        shared = self._shared[name]
        if isinstance(shared, Gauge):
            shared.set(value, tags=closed_labels(self._specs[name], labels))

    def page(self) -> MetricsPage:
        """The exact values, with the names of this replica."""
        context = get_replica_context()
        return MetricsPage(
            deployment=context.deployment,
            replica=context.replica_id.unique_id,
            recorded=frozenset(self._recorded),
            text=self._exact.render(),
        )


def _shared_metric(spec: MetricSpec) -> Counter | Gauge | Histogram:
    # Ray's annotation says one tag; it takes any number.
    labels: tuple[str, ...] | None = tuple(spec.labels)
    match spec.kind:
        case "counter":
            return Counter(spec.name, spec.help, labels)  # type: ignore[arg-type]
        case "gauge":
            return Gauge(spec.name, spec.help, labels)  # type: ignore[arg-type]
        case "histogram":
            return Histogram(spec.name, spec.help, list(spec.buckets), labels)  # type: ignore[arg-type]
