"""Progress on its way to the catalogue: in order, off the event loop, never in the way."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from orthros_service.ingest.ports import ProgressRecorder
from orthros_service.types import IngestProgress

logger = logging.getLogger(__name__)


class Recording:
    """Calls a recorder from one thread, which keeps records in order.

    Args:
        recorder: Where progress goes; it may block and fail.
    """

    def __init__(self, recorder: ProgressRecorder) -> None:
        self._recorder = recorder
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="orthros-progress")

    async def record(self, content_key: str, progress: IngestProgress) -> None:
        """Record progress; a failure is logged."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, self._recorder.record, content_key, progress)
        except Exception:
            # A database that is down must not lose the prefill; the next record tells the same.
            logger.warning(
                "document %s: progress was not recorded", content_key[:12], exc_info=True
            )

    async def close(self) -> None:
        """Wait for what is under way."""
        await asyncio.to_thread(self._executor.shutdown)
