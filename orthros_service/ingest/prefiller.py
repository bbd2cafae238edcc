"""From one document's text to the segments of its state, one stateless prefill step at a time."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from orthros_service.engine.types import PrefillStep, context_segments
from orthros_service.errors import (
    DocumentTooLargeError,
    EmptyDocumentError,
    OrthrosError,
    UnavailableError,
)
from orthros_service.ingest.ports import DocumentTokenizer, PrefillWorker, Source
from orthros_service.settings import PrefillSettings
from orthros_service.state.store import StateStore
from orthros_service.state.transport import SegmentTransport
from orthros_service.state.types import SegmentRef, StateHandle, StateLayout
from orthros_service.types import (
    DocumentText,
    IngestProgress,
    PrefillMode,
    PrefillModeChoice,
    TokenizedDocument,
)

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.2
"""Pause before a failed step is sent again, times the attempts made."""


class Prefiller:
    """Tokenizes documents, chooses their mode and steps them through the workers.

    Every step queues anew for a worker, first come first served, so that a long document never
    holds up a short one for more than a step.

    Args:
        prompt_format: Tokenizes documents behind their header.
        worker: Runs prefill steps.
        num_workers: Steps in flight at once.
        store: Where segments of durable documents are written through.
        transport: Names adopted segments for the workers.
        layout: Layout of every state; its mode is ignored, each document has its own.
        full_prefill_max_tokens: Longest state, header included, that "auto" prefills in full
            attention.
        max_tokens: Longest state, header included, that is accepted.
        settings: Step timeout and retries.
    """

    def __init__(
        self,
        *,
        prompt_format: DocumentTokenizer,
        worker: PrefillWorker,
        num_workers: int,
        store: StateStore,
        transport: SegmentTransport,
        layout: StateLayout,
        full_prefill_max_tokens: int,
        max_tokens: int,
        settings: PrefillSettings,
    ) -> None:
        self._prompt_format = prompt_format
        self._worker = worker
        self._slots = asyncio.Semaphore(num_workers)
        self._store = store
        self._transport = transport
        self._layout = layout
        self._full_prefill_max_tokens = full_prefill_max_tokens
        self._max_tokens = max_tokens
        self._settings = settings

    def wanted_mode(self, source: Source, num_tokens: int) -> PrefillMode:
        """The mode that a source of so many tokens is prefilled in today."""
        if isinstance(source, TokenizedDocument):
            return source.mode
        return self._choose_mode(source.mode, num_tokens)[0]

    async def tokenize(self, source: Source) -> TokenizedDocument:
        """Tokenize a text, off the event loop, and choose its mode; tokens pass through.

        Raises:
            DocumentTooLargeError: Over the token limit; `limit` and `actual` say which.
            EmptyDocumentError: There is no text.
        """
        document, reason = source, "chosen by the caller"
        if isinstance(document, DocumentText):
            document, reason = await self._tokenize_text(document)
        num_tokens = len(document.token_ids)
        logger.info(
            "document %s: %d tokens, mode %s: %s",
            document.content_key[:12],
            num_tokens,
            document.mode,
            reason,
        )
        if num_tokens > self._max_tokens:
            raise DocumentTooLargeError(
                f"The document has {num_tokens} tokens with its header; at most {self._max_tokens} "
                "are allowed. Split it, or ask the operator for a higher limit.",
                phase="prefill",
                limit=self._max_tokens,
                actual=num_tokens,
            )
        return document

    async def prefill(
        self,
        document: TokenizedDocument,
        *,
        is_durable: Callable[[], bool],
        on_progress: Callable[[IngestProgress], Awaitable[None]],
    ) -> StateHandle:
        """Compute every segment of a document.

        Args:
            document: Its tokens and mode.
            is_durable: Whether segments are written through, and earlier ones reused; asked before
                each, since a document can become durable on the way.
            on_progress: Called before every step and at the end.

        Raises:
            OrthrosError: A step failed for good.
        """
        layout = replace(self._layout, mode=document.mode)
        num_tokens, size = len(document.token_ids), layout.segment_tokens
        refs = await self._adopt(document, layout) if is_durable() else []
        first = done = min(len(refs) * size, num_tokens)
        started_at = time.monotonic()
        await on_progress(_progress(document, done, None))
        while done < num_tokens:
            step = PrefillStep(
                layout=layout,
                start=done,
                token_ids=document.token_ids[done : done + size],
                char_starts=document.char_starts[done : done + size],
                char_ends=document.char_ends[done : done + size],
            )
            context = [refs[index] for index in context_segments(layout, len(refs))]
            refs.append(await self._run_step(step, context))
            done += len(step.token_ids)
            if is_durable():
                await self._store.append(document.content_key, layout, len(refs) - 1, refs[-1])
            speed = (done - first) / max(time.monotonic() - started_at, 1e-9)
            await on_progress(_progress(document, done, speed))
        return StateHandle(
            content_key=document.content_key,
            layout=layout,
            segments=tuple(refs),
            num_tokens=num_tokens,
            num_bytes=num_tokens * layout.bytes_per_token,
        )

    async def _tokenize_text(self, source: DocumentText) -> tuple[TokenizedDocument, str]:
        if not source.text.strip():
            raise EmptyDocumentError("The document holds no text; send some.", phase="prefill")
        # Tokens do not depend on the mode, and "auto" needs their number to choose it.
        tokenized = await asyncio.to_thread(
            self._prompt_format.tokenize_document, source.text, source.content_key, "full"
        )
        mode, reason = self._choose_mode(source.mode, len(tokenized.token_ids))
        return replace(tokenized, mode=mode), reason

    def _choose_mode(self, choice: PrefillModeChoice, num_tokens: int) -> tuple[PrefillMode, str]:
        limit = self._full_prefill_max_tokens
        if choice != "auto":
            return choice, "forced by the request"
        if num_tokens <= limit:
            return "full", f"at most full_prefill_max_tokens={limit}"
        return "linear", f"longer than full_prefill_max_tokens={limit}"

    async def _adopt(self, document: TokenizedDocument, layout: StateLayout) -> list[SegmentRef]:
        """References of the segments that an earlier, interrupted ingestion has written."""
        refs: list[SegmentRef] = []
        for segment in await self._store.adopt_partial(document.content_key, layout):
            wanted = document.token_ids[segment.start : segment.start + layout.segment_tokens]
            if not np.array_equal(segment.token_ids, wanted):
                logger.warning(
                    "document %s: stored segment %d holds other tokens and is replaced",
                    document.content_key[:12],
                    len(refs),
                )
                break
            refs.append(await self._transport.put(segment))
        if refs:
            logger.info("document %s: resumes at segment %d", document.content_key[:12], len(refs))
        return refs

    async def _run_step(self, step: PrefillStep, context: Sequence[SegmentRef]) -> SegmentRef:
        timeout_s, num_retries = self._settings.step_timeout_s, self._settings.num_retries
        attempt = 0
        while True:
            error: OrthrosError
            try:
                async with self._slots, asyncio.timeout(timeout_s):
                    return await self._worker.step(step, context)
            except TimeoutError:
                error = UnavailableError(
                    f"No prefill worker finished a step within {timeout_s:g} s; try again later.",
                    phase="prefill",
                )
            except OrthrosError as failure:
                error = failure
            attempt += 1
            if not error.is_retryable or attempt > num_retries:
                raise error
            logger.warning(
                "prefill step at token %d failed (%s), retry %d of %d",
                step.start,
                error.code,
                attempt,
                num_retries,
            )
            await asyncio.sleep(RETRY_DELAY_S * attempt)


def _progress(document: TokenizedDocument, done: int, speed: float | None) -> IngestProgress:
    return IngestProgress(
        status="ingesting",
        mode=document.mode,
        num_tokens=len(document.token_ids),
        tokens_done=done,
        tokens_per_s=speed,
    )
