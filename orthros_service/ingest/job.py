"""One running ingestion and those who wait for it."""

import asyncio
from dataclasses import dataclass, field

from orthros_service.errors import OrthrosError
from orthros_service.ingest.ports import Source
from orthros_service.state.types import StateHandle
from orthros_service.types import IngestProgress

_QUEUED = IngestProgress(
    status="queued", mode=None, num_tokens=None, tokens_done=0, tokens_per_s=None
)


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One running ingestion.

    Args:
        source: What is ingested.
        result: The state, or the error that every waiter gets.
        task: The work.
        is_durable: The catalogue knows the document: record progress, write its state to disk.
        is_kept: Goes on when nobody waits for it any more.
        num_waiters: Callers that wait for the result.
        progress: The latest progress.
    """

    source: Source
    result: asyncio.Future[StateHandle]
    task: asyncio.Task[None] | None = None
    is_durable: bool = False
    is_kept: bool = False
    num_waiters: int = 0
    progress: IngestProgress = field(default=_QUEUED)

    def fail(self, error: OrthrosError) -> None:
        """Give every waiter the error, unless the job has ended already."""
        if not self.result.done():
            self.result.set_exception(error)
            # Marks it as seen: nobody may be waiting.
            self.result.exception()

    def stop(self, error: OrthrosError) -> None:
        """Give every waiter the error and cancel the work."""
        self.fail(error)
        if self.task is not None:
            self.task.cancel()
