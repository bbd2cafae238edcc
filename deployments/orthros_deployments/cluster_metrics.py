"""The metrics of all replicas on one page."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from ray.serve.handle import DeploymentHandle

from orthros_deployments.metrics import MetricsPage
from orthros_service.telemetry import METRICS, MetricSpec

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class ClusterMetrics:
    """Asks every replica for its values.

    Args:
        handles: One per deployment; each has a method `metrics_page`.
    """

    def __init__(self, handles: Sequence[DeploymentHandle[object]]) -> None:
        self._handles = tuple(handles)

    async def render(self) -> str:
        """All values in Prometheus' text format; replicas that do not answer are left out."""
        found = await asyncio.gather(*(_pages(handle) for handle in self._handles))
        pages = [page for pages in found for page in pages]
        return await asyncio.to_thread(merge_pages, pages)


def merge_pages(pages: Iterable[MetricsPage], specs: Iterable[MetricSpec] = METRICS) -> str:
    """One page with the declared metrics of all pages, labelled with deployment and replica.

    Args:
        pages: What the replicas answered.
        specs: The metrics to keep, in order.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(pages, specs))
    return generate_latest(registry).decode()


class _Merged(Collector):
    def __init__(self, pages: Iterable[MetricsPage], specs: Iterable[MetricSpec]) -> None:
        self._metrics: list[Metric] = []
        self._by_sample: dict[str, tuple[str, Metric]] = {}
        for spec in specs:
            metric = Metric(spec.name.removesuffix("_total"), spec.help, spec.kind)
            self._metrics.append(metric)
            self._by_sample.update(dict.fromkeys(_sample_names(spec), (spec.name, metric)))
        for page in pages:
            self._add(page)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics

    def _add(self, page: MetricsPage) -> None:
        where = {"deployment": page.deployment, "replica": page.replica}
        for family in text_string_to_metric_families(page.text):
            for sample in family.samples:
                name, metric = self._by_sample.get(sample.name, (None, None))
                # Times of creation are no metrics of ours.
                if metric is not None and name in page.recorded:
                    labels = {**where, **sample.labels}
                    metric.samples.append(Sample(sample.name, labels, sample.value))


def _sample_names(spec: MetricSpec) -> tuple[str, ...]:
    if spec.kind == "histogram":
        return tuple(f"{spec.name}_{part}" for part in ("bucket", "sum", "count"))
    return (spec.name,)


async def _pages(handle: DeploymentHandle[object]) -> list[MetricsPage]:
    try:
        answers = await handle.broadcast("metrics_page").results_async(
            timeout_s=_TIMEOUT_S, return_exceptions=True
        )
    except Exception:
        # A page with what the others say is worth more than none.
        logger.warning("%s gave no metrics", handle.deployment_name, exc_info=True)
        return []
    for error in answers:
        if isinstance(error, Exception):
            logger.warning(
                "a replica of %s gave no metrics: %s", handle.deployment_name, type(error).__name__
            )
    return [answer for answer in answers if isinstance(answer, MetricsPage)]
