"""One request in flight: its deadline, its numbers and how far it is."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

from orthros_service.engine.types import DecodeWork
from orthros_service.errors import CancelledError, DeadlineExceededError
from orthros_service.types import GenerationFinished, GenerationRequest

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """What the pipeline knows of a request while it runs.

    Args:
        request: What was asked.
        deadline: When it must be done, on the event loop's clock.
        phase: How far it is.
        preparing: The task that waits for states, once it was started.
        is_revoked: Whether `cancel` was called.
    """

    request: GenerationRequest
    deadline: float
    started_at: float = field(default_factory=time.perf_counter)
    phase: str = "prefill"
    prefill_s: float = 0.0
    max_tokens: int = 0
    is_linear: bool = False
    document_tokens: int = 0
    prompt_tokens: int = 0
    preparing: asyncio.Task[DecodeWork] | None = None
    is_revoked: bool = False

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, >= 0."""
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Hold the work inside to the deadline; do not yield to a caller in there.

        Raises:
            DeadlineExceededError: The deadline has passed.
        """
        limit = asyncio.timeout_at(self.deadline)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceededError(
                f"The request was not done within {self.request.deadline_s:g} s; it was in the "
                f"{self.phase} phase. Send it again or allow more time.",
                phase=self.phase,
            ) from None

    def revoked(self) -> CancelledError:
        """The error of a caller that called `cancel`."""
        return CancelledError("The request was cancelled.", phase=self.phase)

    def log(self, outcome: str, finished: GenerationFinished | None) -> None:
        """Write the request's one line: numbers, never text."""
        numbers: dict[str, object] = {
            "request_id": self.request.request_id,
            "phase": self.phase,
            "outcome": outcome,
            "num_documents": len(self.request.documents),
            "document_tokens": self.document_tokens,
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "total_s": round(time.perf_counter() - self.started_at, 4),
        }
        if finished is not None:
            numbers["completion_tokens"] = finished.completion_tokens
            numbers["num_evidence"] = len(finished.evidence)
            numbers |= {name: round(value, 4) for name, value in asdict(finished.timings).items()}
        logger.info("generation ended", extra=numbers)
