"""One running ingestion and those who wait for it."""

import asyncio
from dataclasses import dataclass, field

from orthros_service.errors import DeadlineExceededError, OrthrosError
from orthros_service.ingest.ports import Source
from orthros_service.state.types import StateHandle
from orthros_service.types import IngestProgress

_QUEUED = IngestProgress(
    status="queued", mode=None, num_tokens=None, tokens_done=0, tokens_per_s=None
)


def not_ready_in_time(timeout_s: float) -> DeadlineExceededError:
    """The error of a caller whose state was not ready within timeout_s."""
    return DeadlineExceededError(
        f"The document was not ready within {timeout_s:.1f} s. Ask again later or allow more time.",
        phase="prefill",
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
        wanted_until: Event loop time until which a caller that polls may come back.
        progress: The latest progress.
    """

    source: Source
    result: asyncio.Future[StateHandle]
    task: asyncio.Task[None] | None = None
    is_durable: bool = False
    is_kept: bool = False
    num_waiters: int = 0
    wanted_until: float = 0.0
    progress: IngestProgress = field(default=_QUEUED)

    async def wait(self, *, timeout_s: float, grace_s: float) -> StateHandle | None:
        """Wait for the state, or return None after timeout_s and stay wanted for grace_s more.

        Raises:
            OrthrosError: The ingestion failed.
        """
        loop = asyncio.get_running_loop()
        # Whoever asked for time to come back is here now.
        self.wanted_until = 0.0
        self.num_waiters += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self.result)
        except TimeoutError:
            self.wanted_until = max(self.wanted_until, loop.time() + grace_s)
            return None
        finally:
            self.num_waiters -= 1

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
