"""Running one generation on the backend: admission, deadline, metrics, and no work left behind."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from orthros_service.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineError,
)
from orthros_service.gateway.context import GatewayContext
from orthros_service.gateway.request_state import RequestState
from orthros_service.types import (
    DocumentText,
    GenerationEvent,
    GenerationFinished,
    GenerationRequest,
    Message,
    SamplingParameters,
)

logger = logging.getLogger(__name__)

# The backend keeps the deadline too; its error says more, so it gets the first word.
_DEADLINE_GRACE_S = 1.0
_RELEASE_TIMEOUT_S = 5.0
# Longer waits for a state were a prefill, or as slow as one.
_LOOK_UP_MAX_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """What a face of the API asks for.

    Args:
        generation_id: Unique, also where two requests carry the same request id.
        documents: The context, in order; empty for plain chat.
        messages: System message, history and the last user turn.
        sampling: How tokens are chosen.
        wants_citations: Whether to run the evidence pass.
        deadline_s: Seconds from the request's arrival.
    """

    generation_id: str
    documents: tuple[DocumentText, ...]
    messages: tuple[Message, ...]
    sampling: SamplingParameters
    wants_citations: bool
    deadline_s: float


class Generation:
    """One generation, from its place in the queue to its last token.

    Either `start` it, read its `events` and `close` it, or just `finish` it. Whatever happens, no
    work is left behind on the backend once it is closed.

    Args:
        context: The app's context.
        state: The HTTP request's state; receives the numbers for the log.
        job: What to generate.

    Attributes:
        queue_s: Seconds spent waiting for admission.
    """

    def __init__(self, context: GatewayContext, state: RequestState, job: GenerationJob) -> None:
        self.job = job
        self.queue_s = 0.0
        self._context = context
        self._metrics = context.metrics
        self._state = state
        state.phase = "queue"
        self._deadline = state.arrived + job.deadline_s
        self._first_token_s: float | None = None
        self._last_token = 0.0
        self._is_finished = False
        self._is_streamed = False
        self._first: GenerationEvent | None = None
        self._run_events = self._run()

    @property
    def _phase(self) -> str:
        return self._state.phase or "queue"

    async def start(self) -> None:
        """Wait for the first event; cancelling the wait stops the work.

        Raises:
            OrthrosError: The generation failed before it.
        """
        self._is_streamed = True
        self._first = await anext(self._run_events)

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Yield text as it comes and, last, the finished generation.

        Raises:
            OrthrosError: The generation failed.
        """
        if self._first is not None:
            yield self._first
        async for event in self._run_events:
            yield event

    def mark_delivered(self) -> None:
        """Say that the last event goes out now: who leaves from here on has cancelled nothing."""
        self._state.is_delivered = True

    async def close(self) -> None:
        """Stop the work, if it still runs."""
        await self._run_events.aclose()

    async def finish(self) -> GenerationFinished:
        """Run to the end and return the last event; cancelling the wait stops the work.

        Raises:
            OrthrosError: The generation failed.
        """
        try:
            async for event in self.events():
                if isinstance(event, GenerationFinished):
                    return event
        finally:
            await self.close()
        raise AssertionError("the events end with a finished generation, or raise")

    async def _run(self) -> AsyncGenerator[GenerationEvent, None]:
        try:
            async with self._context.admission.slot(timeout_s=self._remaining_s()) as self.queue_s:
                self._state.phase = "prefill"
                async with aclosing(self._backend_events()) as events:
                    async for event in events:
                        self._measure(event)
                        yield event
        except (asyncio.CancelledError, GeneratorExit):
            if not self._is_finished:
                self._metrics.increment("orthros_cancellations_total", phase=self._phase)
            raise

    def _remaining_s(self) -> float:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise self._deadline_exceeded()
        return remaining_s

    def _deadline_exceeded(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"The request was not done within its deadline of {self.job.deadline_s:g} s; it got as "
            f"far as {self._phase}. Send it again with a longer deadline_s.",
            phase=self._phase,
            limit=self.job.deadline_s,
        )

    async def _backend_events(self) -> AsyncGenerator[GenerationEvent, None]:
        job = self.job
        request = GenerationRequest(
            request_id=job.generation_id,
            documents=job.documents,
            messages=job.messages,
            sampling=job.sampling,
            wants_citations=job.wants_citations,
            deadline_s=self._remaining_s(),
            is_streamed=self._is_streamed,
        )
        events = self._context.backend.generate(request)
        has_ended = False
        try:
            while not has_ended:
                try:
                    event = await self._next(events)
                except Exception:
                    has_ended = True
                    raise
                if isinstance(event, GenerationFinished):
                    has_ended = True
                    self._check_finished(event)
                yield event
        finally:
            await self._release(events, has_ended=has_ended)

    async def _next(self, events: AsyncIterator[GenerationEvent]) -> GenerationEvent:
        try:
            async with asyncio.timeout(self._deadline - time.monotonic() + _DEADLINE_GRACE_S):
                return await anext(events)
        except StopAsyncIteration:
            raise EngineError(
                "The generation ended without a result; send the request again.", phase=self._phase
            ) from None
        except TimeoutError:
            raise self._deadline_exceeded() from None

    def _check_finished(self, finished: GenerationFinished) -> None:
        if finished.finish_reason == "error":
            raise EngineError("The generation failed; send the request again.", phase=self._phase)
        if finished.finish_reason == "cancelled":
            raise CancelledError("The generation was revoked.", phase=self._phase)

    async def _release(self, events: AsyncIterator[GenerationEvent], *, has_ended: bool) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                if isinstance(events, AsyncGenerator):
                    await events.aclose()
                if not has_ended:
                    await self._context.backend.cancel(self.job.generation_id)
        except Exception:
            # The caller has its result, or has gone; a worker drops what nobody keeps alive.
            logger.exception("generation %s was not released cleanly", self.job.generation_id)
        if not has_ended:
            self._metrics.observe(
                "orthros_cancel_release_seconds", time.monotonic() - started, phase=self._phase
            )

    def _measure(self, event: GenerationEvent) -> None:
        now = time.monotonic()
        if isinstance(event, GenerationFinished):
            self._measure_finished(event)
        elif event.num_tokens:
            if self._first_token_s is None:
                self._first_token_s = now - self._state.arrived
            else:
                gap_s = (now - self._last_token) / event.num_tokens
                self._metrics.observe("orthros_inter_token_seconds", gap_s)
            self._last_token = now
            self._state.phase = "decode"

    def _cache_result(self, prefill_s: float) -> str:
        if not self.job.documents:
            return "none"
        return "miss" if prefill_s > _LOOK_UP_MAX_S else "hit"

    def _measure_finished(self, event: GenerationFinished) -> None:
        self._is_finished = True
        timings = event.timings
        for phase, seconds in (
            ("queue", timings.queue_s + self.queue_s),
            ("prefill", timings.prefill_s),
            ("handoff", timings.handoff_s),
            ("first_step", timings.first_token_s),
            ("decode", timings.decode_s),
        ):
            self._metrics.observe("orthros_request_phase_seconds", seconds, phase=phase)
        self._metrics.increment("orthros_prompt_tokens_total", event.prompt_tokens)
        self._metrics.increment("orthros_generated_tokens_total", event.completion_tokens)
        if self._first_token_s is not None:
            self._metrics.observe(
                "orthros_time_to_first_token_seconds",
                self._first_token_s,
                cache=self._cache_result(timings.prefill_s),
            )
            self._state.numbers["first_token_s"] = round(self._first_token_s, 4)
        self._state.numbers |= {
            "document_tokens": event.document_tokens,
            "prompt_tokens": event.prompt_tokens,
            "completion_tokens": event.completion_tokens,
        }
