"""The `orthros_*` metrics of all replicas, merged from the node agents of the cluster."""

import asyncio
import logging
from collections.abc import Iterable, Iterator

import httpx
import ray
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from orthros_service.telemetry import METRICS, MetricSpec

logger = logging.getLogger(__name__)

_RAY_PREFIX = "ray_"
_TIMEOUT_S = 5.0
_KEPT_LABELS = frozenset({"deployment", "replica", "le"})


class ClusterMetrics:
    """Asks every node agent and keeps our own series; small clusters only.

    A large cluster lets Prometheus scrape the agents itself, where the same series are called
    `ray_orthros_*`.
    """

    async def render(self) -> str:
        """All series in Prometheus' text format; an agent that does not answer is left out."""
        urls = await asyncio.to_thread(_agent_urls)
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
            pages = await asyncio.gather(*(_scrape(client, url) for url in urls))
        return await asyncio.to_thread(merge_pages, pages)


def merge_pages(pages: Iterable[str], specs: Iterable[MetricSpec] = METRICS) -> str:
    """One page with the declared metrics of all pages, under their public names.

    Args:
        pages: What node agents answered.
        specs: The metrics to keep; everything else is dropped.
    """
    samples: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {}
    known = {f"{_RAY_PREFIX}{name}": spec for spec in specs for name in _sample_names(spec)}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                spec = known.get(sample.name)
                if spec is None:
                    continue
                name = sample.name.removeprefix(_RAY_PREFIX)
                labels = {
                    key: value
                    for key, value in sample.labels.items()
                    if key in _KEPT_LABELS or key in spec.labels
                }
                key = (name, frozenset(labels.items()))
                samples.setdefault(spec.name, {})[key] = Sample(name, labels, sample.value)
    registry = CollectorRegistry()
    registry.register(_Merged(specs, samples))
    return generate_latest(registry).decode()


class _Merged(Collector):
    def __init__(
        self,
        specs: Iterable[MetricSpec],
        samples: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]],
    ) -> None:
        self._specs = tuple(specs)
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        for spec in self._specs:
            metric = Metric(spec.name.removesuffix("_total"), spec.help, spec.kind)
            metric.samples = list(self._samples.get(spec.name, {}).values())
            yield metric


def _sample_names(spec: MetricSpec) -> tuple[str, ...]:
    if spec.kind == "histogram":
        return tuple(f"{spec.name}_{part}" for part in ("bucket", "sum", "count"))
    return (spec.name,)


def _agent_urls() -> list[str]:
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]


async def _scrape(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get(url)
        response.raise_for_status()
    except httpx.HTTPError as error:
        logger.warning("the node agent %s gave no metrics: %s", url, type(error).__name__)
        return ""
    return response.text
