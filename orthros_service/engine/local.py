"""Workers in process: they drive the compute-bound engines from an event loop.

The decode worker is also what a decode replica on a cluster consists of, with another transport.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Protocol

from orthros_service.engine.batch_driver import BatchDriver, DecodeStepper, PendingSequence
from orthros_service.engine.types import DecodeFinished, DecodeOutput, DecodeWork, PrefillStep
from orthros_service.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineError,
    StateCorruptedError,
    UnavailableError,
)
from orthros_service.settings import DecodeSettings
from orthros_service.state.transport import LocalTransport, SegmentTransport
from orthros_service.state.types import AttentionState, Segment, SegmentRef, StateLayout

logger = logging.getLogger(__name__)


class PrefillStepper(Protocol):
    """The prefill engine, as the worker sees it."""

    def step(
        self, step: PrefillStep, context: Sequence[Segment], *, is_cancelled: Callable[[], bool]
    ) -> Segment:
        """Compute one segment; blocks."""
        ...


class LocalPrefillWorker:
    """Runs prefill steps of an engine of this process.

    Args:
        engine: Does the work.
        executor: One thread, so that steps run one after another.
    """

    def __init__(self, engine: PrefillStepper, executor: Executor) -> None:
        self._engine = engine
        self._executor = executor
        self._transport = LocalTransport()

    async def step(self, step: PrefillStep, context: Sequence[SegmentRef]) -> SegmentRef:
        """Compute one segment; a cancelled call stops the engine at its next check."""
        segments = await self._transport.get_many(context)
        is_cancelled = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._executor,
                lambda: self._engine.step(step, segments, is_cancelled=is_cancelled.is_set),
            )
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    async def is_ready(self) -> bool:
        """An engine that exists is ready."""
        return True


class LocalDecodeWorker:
    """Batches requests over one decode engine and streams their outputs.

    Create it inside a running event loop, and `close` it there. New requests join, and cancelled
    ones leave, between two steps.

    Args:
        engine: Does the work, in a thread of the worker's own.
        transport: Resolves the segments of the documents.
        layout: What every document's state must look like; its mode is ignored.
        settings: Batch size and streaming interval.
    """

    def __init__(
        self,
        engine: DecodeStepper,
        *,
        transport: SegmentTransport,
        layout: StateLayout,
        settings: DecodeSettings,
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._layout = layout
        self._stream_interval_s = settings.stream_interval_s
        self._driver = BatchDriver(engine, max_sequences=settings.max_sequences)
        self._sequences: dict[str, PendingSequence] = {}
        self._is_closed = False

    async def generate(self, work: DecodeWork) -> AsyncGenerator[DecodeOutput, None]:
        """Stream one request; the last output is a `DecodeFinished`.

        Closing the generator frees the sequence within one step.

        Raises:
            StateMismatchError: A document was prefilled by another model.
            DeadlineExceededError: `work.deadline_s` has passed.
            CancelledError: `cancel` was called.
            EngineError: The engine failed.
            UnavailableError: The worker is shutting down.
        """
        if self._is_closed:
            raise UnavailableError("The decode worker is shutting down; send the request again.")
        if work.request_id in self._sequences:
            raise EngineError(f"Request {work.request_id} is already running.", phase="decode")
        deadline = asyncio.get_running_loop().time() + work.deadline_s
        sequence = PendingSequence(work=work)
        self._sequences[work.request_id] = sequence
        try:
            async with _deadline(sequence, deadline):
                await self._hand_off(sequence)
            if not sequence.outlet.has_ended:
                self._driver.submit(sequence)
            while True:
                async with _deadline(sequence, deadline):
                    output = await sequence.outlet.take()
                yield output
                if isinstance(output, DecodeFinished):
                    return
                await sequence.outlet.rest(self._stream_interval_s)
        finally:
            self._driver.drop(sequence)
            del self._sequences[work.request_id]

    async def cancel(self, request_id: str) -> None:
        """End a request with a `CancelledError`; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.outlet.end(CancelledError("The request was cancelled.", phase=sequence.phase))
            self._driver.drop(sequence)

    def confirm(self, request_ids: Iterable[str]) -> None:
        """Note that the callers of these requests are still there; unknown ids are ignored."""
        now = time.perf_counter()
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                sequence.confirmed_at = now

    def drop_unconfirmed(self, *, older_than_s: float) -> None:
        """End the requests whose callers have not been heard of for so long; they may be dead."""
        limit = time.perf_counter() - older_than_s
        for sequence in list(self._sequences.values()):
            if sequence.confirmed_at < limit:
                logger.warning(
                    "request %s: its caller is gone without a word; its sequence is freed",
                    sequence.work.request_id,
                )
                sequence.outlet.end(
                    UnavailableError(
                        "The decode worker lost touch with the request; send it again.",
                        phase=sequence.phase,
                    )
                )
                self._driver.drop(sequence)

    @property
    def num_sequences(self) -> int:
        """Requests that are handed over, wait or decode."""
        return len(self._sequences)

    async def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return not self._is_closed

    async def close(self) -> None:
        """End every request and stop the thread."""
        self._is_closed = True
        for sequence in list(self._sequences.values()):
            sequence.outlet.end(
                UnavailableError("The decode worker is shutting down; send the request again.")
            )
            self._driver.drop(sequence)
        await self._driver.close()

    async def _hand_off(self, sequence: PendingSequence) -> None:
        """Resolve the documents' segments; nothing is copied where the transport allows it."""
        started_at = time.perf_counter()
        handles = sequence.work.documents
        for handle in handles:
            handle.layout.check_matches(self._layout)
        segments = await self._transport.get_many([ref for h in handles for ref in h.segments])
        states, first = [], 0
        for handle in handles:
            last = first + len(handle.segments)
            state = AttentionState(layout=handle.layout, segments=tuple(segments[first:last]))
            if state.num_tokens != handle.num_tokens:
                raise StateCorruptedError(
                    f"A document's state holds {state.num_tokens} tokens, {handle.num_tokens} were "
                    "expected. Ingest it again.",
                    phase="handoff",
                )
            states.append(state)
            first = last
        sequence.states = tuple(states)
        sequence.handoff_s = time.perf_counter() - started_at


@asynccontextmanager
async def _deadline(sequence: PendingSequence, deadline: float) -> AsyncIterator[None]:
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceededError(
            f"The request was not done within {sequence.work.deadline_s:g} s; it was in the "
            f"{sequence.phase} phase. Send it again or allow more time.",
            phase=sequence.phase,
        ) from None
