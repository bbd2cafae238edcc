"""The decode replica: continuous batching over shared states, tokens streamed as they come.

Torch is imported in the constructor: the process that deploys this class shall not load it.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from orthros_deployments.leases import CONFIRM_EVERY_S, LEASE_S
from orthros_deployments.metrics import MetricsPage, ReplicaMetrics
from orthros_deployments.replica_logging import configure_replica_logging
from orthros_deployments.transport import RayTransport
from orthros_service.engine.local import LocalDecodeWorker
from orthros_service.engine.types import DecodeFinished, DecodeOutput, DecodeWork
from orthros_service.settings import Settings
from orthros_service.tokenization.stream import TextStream


class Decode:
    """Answers requests over states that other processes made.

    Args:
        settings: All settings.
    """

    # Serve awaits an asynchronous constructor, and the worker must be made inside the event loop.
    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]
        from orthros_deployments.worker_model import load_worker_model
        from orthros_service.engine.decode import DecodeEngine

        configure_replica_logging(settings.log)
        served = load_worker_model(settings, for_decode=True)
        self._engine = DecodeEngine(
            served.loaded, served.layout, new_stream=lambda: TextStream(served.tokenizer)
        )
        self._worker = LocalDecodeWorker(
            self._engine, transport=RayTransport(), layout=served.layout, settings=settings.decode
        )
        self._metrics = ReplicaMetrics()
        self._watching = asyncio.create_task(self._watch_callers())

    async def generate(self, work: DecodeWork) -> AsyncGenerator[DecodeOutput, None]:
        """Stream one request; a caller that leaves frees its sequence within one step."""
        async with aclosing(self._worker.generate(work)) as outputs:
            async for output in outputs:
                if isinstance(output, DecodeFinished):
                    self._record(work, output)
                yield output

    async def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        await self._worker.cancel(request_id)

    async def confirm(self, request_ids: Sequence[str]) -> None:
        """Note that the callers of these requests are still there; see `leases`."""
        self._worker.confirm(request_ids)

    async def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return await self._worker.is_ready()

    async def num_sequences(self) -> int:
        """Sequences that hold memory in this replica's engine."""
        return self._engine.num_sequences

    async def metrics_page(self) -> MetricsPage:
        """This replica's metrics."""
        self._measure()
        return self._metrics.page()

    async def _watch_callers(self) -> None:
        while True:
            await asyncio.sleep(CONFIRM_EVERY_S)
            self._worker.drop_unconfirmed(older_than_s=LEASE_S)
            self._measure()

    def _measure(self) -> None:
        self._metrics.set("orthros_decode_sequences", self._worker.num_sequences)

    def _record(self, work: DecodeWork, output: DecodeFinished) -> None:
        if work.documents:
            num_bytes = sum(handle.num_bytes for handle in work.documents)
            self._metrics.increment("orthros_handoff_bytes_total", num_bytes, tier="memory")
            self._metrics.observe("orthros_handoff_seconds", output.handoff_s, tier="memory")
