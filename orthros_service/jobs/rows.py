"""One input row in, one output row out: an answer, or an error with a code. Never an exception."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from orthros_service.documents.text import content_key
from orthros_service.errors import DeadlineExceededError, EngineError, OrthrosError, OverloadedError
from orthros_service.jobs.reading import Chunk
from orthros_service.jobs.row_text import (
    RowDocument,
    RowRefusedError,
    has_hidden_characters,
    read_document,
    read_question,
    repair_surrogates,
)
from orthros_service.jobs.row_types import RowResult, RowTask, failed_result
from orthros_service.types import (
    DocumentText,
    EvidenceSpan,
    GenerationBackend,
    GenerationFinished,
    GenerationRequest,
    Message,
    SamplingParameters,
)

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One row before it is decoded."""

    source_file: str
    read_error: str | None
    text: bytes | None
    question: bytes | None


class RowAnswerer:
    """Answers rows against a backend, so many at once; belongs to one event loop.

    Args:
        backend: The same workers that serve the API.
        task: What is asked.
        concurrency: Rows in flight at once, over all chunks.
    """

    def __init__(self, backend: GenerationBackend, *, task: RowTask, concurrency: int) -> None:
        self._backend = backend
        self._task = task
        self._slots = asyncio.Semaphore(concurrency)

    async def answer_chunk(
        self, chunk: Chunk, *, on_row: Callable[[RowResult], None]
    ) -> list[RowResult]:
        """Answer every row of a chunk; results come in the order of the rows.

        Args:
            chunk: Rows to answer.
            on_row: Called as each row is done, in any order.
        """
        files = chunk.identity.column("_source_file")
        texts = self._task.text.read_bytes(chunk.rows)
        questions = None
        if self._task.question is not None:
            questions = self._task.question.read_bytes(chunk.rows)

        async def answer(index: int) -> RowResult:
            async with self._slots:
                # Values are copied out of Arrow only while their row is in flight.
                cell = _Cell(
                    source_file=files[index].as_py(),
                    read_error=chunk.read_errors[index].as_py(),
                    text=texts[index].as_py(),
                    question=questions[index].as_py() if questions is not None else None,
                )
                result = await self._answer(cell)
            on_row(result)
            return result

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(index)) for index in range(chunk.rows.num_rows)]
        return [each.result() for each in tasks]

    async def _answer(self, cell: _Cell) -> RowResult:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._task.deadline_s):
                return await self._generate(cell, started=started)
        except RowRefusedError as error:
            return failed_result(error.code, error.message, started=started)
        except TimeoutError:
            message = f"The row was not done within {self._task.deadline_s:g} s."
            return failed_result(DeadlineExceededError.code, message, started=started)
        except OrthrosError as error:
            return failed_result(error.code, error.message, started=started)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            # Nobody cancelled this row: a worker that died can surface as a cancellation.
            return failed_result(
                EngineError.code, "The engine dropped the request.", started=started
            )
        except Exception as error:  # noqa: BLE001 - a batch row is the edge where all ends
            _log.warning("a row failed with %s", type(error).__name__)
            message = f"{type(error).__name__}: {error}"
            return failed_result(EngineError.code, message, started=started)

    async def _generate(self, cell: _Cell, *, started: float) -> RowResult:
        document, question = self._read(cell)
        request = GenerationRequest(
            request_id=f"batch-{uuid.uuid4().hex}",
            documents=(
                DocumentText(
                    content_key=content_key(document.text, self._task.prefill_mode),
                    text=document.text,
                    mode=self._task.prefill_mode,
                ),
            ),
            messages=(Message(role="user", content=question),),
            sampling=SamplingParameters(max_tokens=self._task.max_tokens),
            wants_citations=self._task.citations,
            deadline_s=self._task.deadline_s,
            is_streamed=False,
        )
        finished = await self._generate_patiently(request)
        if finished.finish_reason in ("error", "cancelled"):
            raise EngineError(f"The engine ended the answer with {finished.finish_reason!r}.")
        return RowResult(
            status="ok",
            answer=repair_surrogates(finished.text),
            finish_reason=finished.finish_reason,
            document_tokens=finished.document_tokens,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            citations=[_citation(span, document) for span in finished.evidence],
            queue_s=finished.timings.queue_s,
            prefill_s=finished.timings.prefill_s,
            decode_s=finished.timings.decode_s,
            total_s=time.monotonic() - started,
            has_hidden_characters=has_hidden_characters(document.original),
        )

    def _read(self, cell: _Cell) -> tuple[RowDocument, str]:
        if cell.read_error is not None:
            raise RowRefusedError(
                "unreadable_row", f"The row cannot be decoded from its file: {cell.read_error}"
            )
        if cell.source_file in self._task.files_without_text:
            name = self._task.text.name
            raise RowRefusedError("null_document", f"The column {name!r} is absent in this file.")
        document = read_document(cell.text, max_bytes=self._task.max_document_bytes)
        if self._task.fixed_question is not None:
            return document, self._task.fixed_question
        return document, read_question(cell.question)

    async def _generate_patiently(self, request: GenerationRequest) -> GenerationFinished:
        """Generate, and again after failures that may pass.

        Raises:
            OrthrosError: It cannot pass, or came once too often.
        """
        num_failures, pause_s = 0, _FIRST_PAUSE_S
        while True:
            try:
                return await self._generate_once(request)
            except DeadlineExceededError:
                raise
            except OrthrosError as error:
                # An overloaded service asks for patience; only the row's deadline ends that.
                num_failures += not isinstance(error, OverloadedError)
                if not error.is_retryable or num_failures > self._task.num_retries:
                    raise
                asked_s = error.details.get("retry_after_s")
            await asyncio.sleep(float(asked_s) if isinstance(asked_s, int | float) else pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _generate_once(self, request: GenerationRequest) -> GenerationFinished:
        events = self._backend.generate(request)
        try:
            async for event in events:
                if isinstance(event, GenerationFinished):
                    return event
        finally:
            # Closing an unfinished stream is what cancels the work behind it.
            if isinstance(events, AsyncGenerator):
                await events.aclose()
        raise EngineError("The engine ended without a result.")


def _citation(span: EvidenceSpan, document: RowDocument) -> dict[str, Any]:
    start, end = document.original_offsets([span.start_char, span.end_char])
    return {"start_char": start, "end_char": end, "quote": document.original[start:end]}
