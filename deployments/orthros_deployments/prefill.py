"""The prefill replica: one stateless step per call, any replica for any step.

Torch is imported in the constructor: the process that deploys this class shall not load it.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from orthros_deployments.descriptions import WorkerDescription
from orthros_deployments.metrics import MetricsPage, ReplicaMetrics
from orthros_deployments.replica_logging import configure_replica_logging
from orthros_deployments.transport import RayTransport
from orthros_service.engine.local import LocalPrefillWorker
from orthros_service.engine.types import PrefillStep
from orthros_service.settings import Settings
from orthros_service.state.types import Segment, SegmentRef
from orthros_service.telemetry import log_context


class Prefill:
    """Computes segments; keeps nothing between calls.

    Args:
        settings: All settings.
    """

    def __init__(self, settings: Settings) -> None:
        from orthros_deployments.worker_model import load_worker_model
        from orthros_service.engine.prefill import PrefillEngine

        configure_replica_logging(settings.log)
        served = load_worker_model(settings, for_decode=False)
        self._description = WorkerDescription(
            model=served.info, layout=served.layout, tile=served.loaded.orthros.tile
        )
        self._worker = LocalPrefillWorker(
            PrefillEngine(served.loaded, served.layout),
            ThreadPoolExecutor(1, thread_name_prefix="orthros-prefill"),
        )
        self._transport = RayTransport()
        self._metrics = ReplicaMetrics()

    async def step(self, step: PrefillStep, context: Sequence[SegmentRef]) -> Segment:
        """Compute one segment, which the caller owns; a cancelled call stops the engine.

        Args:
            step: The tokens.
            context: Object references of the segments that `context_segments` names, in a list, so
                that nothing but this process fetches them.
        """
        with log_context(phase="prefill"):
            segments = await self._transport.get_many(context)
            segment = await self._worker.step(step, segments)
        assert isinstance(segment, Segment)
        self._metrics.increment(
            "orthros_prefill_tokens_total", segment.num_tokens, mode=step.layout.mode
        )
        return segment

    async def describe(self) -> WorkerDescription:
        """What this worker has loaded."""
        return self._description

    async def is_ready(self) -> bool:
        """Whether steps are taken."""
        return await self._worker.is_ready()

    async def metrics_page(self) -> MetricsPage:
        """This replica's metrics."""
        return self._metrics.page()
