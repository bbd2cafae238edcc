"""The decode replica: continuous batching over shared states, tokens streamed as they come."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from orthros_deployments.machine import with_worker_threads
from orthros_deployments.transport import RayTransport
from orthros_service.engine.decode import DecodeEngine
from orthros_service.engine.local import LocalDecodeWorker
from orthros_service.engine.served_model import load_served_model
from orthros_service.engine.types import DecodeOutput, DecodeWork
from orthros_service.settings import Settings
from orthros_service.telemetry import configure_logging
from orthros_service.tokenization.stream import TextStream


class Decode:
    """Answers requests over states that other processes made.

    Args:
        settings: All settings.
    """

    async def __init__(self, settings: Settings) -> None:
        configure_logging(settings.log)
        served = load_served_model(with_worker_threads(settings), for_decode=True)
        engine = DecodeEngine(
            served.loaded, served.layout, new_stream=lambda: TextStream(served.tokenizer)
        )
        self._worker = LocalDecodeWorker(
            engine, transport=RayTransport(), layout=served.layout, settings=settings.decode
        )

    async def generate(self, work: DecodeWork) -> AsyncGenerator[DecodeOutput, None]:
        """Stream one request; a caller that leaves frees its sequence within one step."""
        async with aclosing(self._worker.generate(work)) as outputs:
            async for output in outputs:
                yield output

    async def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        await self._worker.cancel(request_id)

    async def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return await self._worker.is_ready()
