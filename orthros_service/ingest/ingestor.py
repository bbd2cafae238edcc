"""One ingestion job per content, whoever asks for it.

Documents of the catalogue are durable: their progress is recorded, their segments are written
through, and an interrupted ingestion resumes at the last one written. Inline texts and chat
prefixes stay in memory, since nobody could ever delete their files.
"""

import asyncio
import logging
from dataclasses import replace

from orthros_service.errors import (
    CancelledError,
    EngineError,
    OrthrosError,
    UnavailableError,
)
from orthros_service.ingest.job import Job, not_ready_in_time
from orthros_service.ingest.ports import DocumentTokenizer, PrefillWorker, ProgressRecorder, Source
from orthros_service.ingest.prefiller import Prefiller
from orthros_service.ingest.recording import Recording
from orthros_service.settings import PrefillSettings
from orthros_service.state.store import StateStore
from orthros_service.state.transport import SegmentTransport
from orthros_service.state.types import StateHandle, StateLayout
from orthros_service.telemetry.context import log_context
from orthros_service.types import DocumentText, IngestProgress

logger = logging.getLogger(__name__)
_DELETED = "The state of this text was deleted while it was made; send the request again."


class Ingestor:
    """Turns documents into ready states, several at a time.

    Create it inside a running event loop, and `close` it there.

    Args:
        prompt_format: Tokenizes documents behind their header.
        worker: Runs prefill steps.
        store: Keeps the states.
        transport: Names segments for the workers.
        layout: Layout of every state; its mode is ignored, each document has its own.
        full_prefill_max_tokens: Longest state, header included, that "auto" prefills in full
            attention: `settings.full_prefill_max_tokens`, or the model's own value.
        max_context_tokens: Longest context of the model.
        max_document_tokens: Longest document that the operator allows.
        settings: Step timeout and retries.
        recorder: Where progress of the catalogue's documents goes.
        num_workers: Prefill steps in flight at once.
    """

    def __init__(
        self,
        *,
        prompt_format: DocumentTokenizer,
        worker: PrefillWorker,
        store: StateStore,
        transport: SegmentTransport,
        layout: StateLayout,
        full_prefill_max_tokens: int,
        max_context_tokens: int,
        max_document_tokens: int,
        settings: PrefillSettings,
        recorder: ProgressRecorder,
        num_workers: int = 1,
    ) -> None:
        self._worker = worker
        self._store = store
        self._layout = layout
        self._prefiller = Prefiller(
            prompt_format=prompt_format,
            worker=worker,
            num_workers=num_workers,
            store=store,
            transport=transport,
            layout=layout,
            full_prefill_max_tokens=full_prefill_max_tokens,
            max_tokens=min(max_document_tokens, max_context_tokens),
            settings=settings,
        )
        self._recording = Recording(recorder)
        self._jobs: dict[str, Job] = {}
        self._deletions: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    async def start(self, document: DocumentText) -> None:
        """Start ingesting a document, or join the running job; returns at once.

        Raises:
            UnavailableError: The ingestor is shutting down.
        """
        job = self._join(document)
        job.is_kept = True
        if job.progress.status != "queued":
            # The catalogue may have learned of this document after the job's last report.
            await self._record(job)

    async def wait_ready(self, source: Source, *, timeout_s: float) -> StateHandle:
        """Ingest if need be and wait for the state.

        When the last waiter of a text that is not in the catalogue leaves, its ingestion stops.

        Raises:
            DeadlineExceededError: Not ready within timeout_s; the ingestion of a catalogued
                document goes on.
            OrthrosError: The ingestion failed; every waiter gets the same error.
        """
        handle = await self.poll(source, timeout_s=timeout_s, grace_s=0)
        if handle is None:
            raise not_ready_in_time(timeout_s)
        return handle

    async def poll(self, source: Source, *, timeout_s: float, grace_s: float) -> StateHandle | None:
        """Like `wait_ready` in pieces, for callers that may die without a word.

        Returns:
            The state, or None if it is not ready within timeout_s. A caller that still wants it
            must poll again within grace_s; one that does not counts as having left.

        Raises:
            OrthrosError: The ingestion failed.
        """
        handle = self._ready(source)
        if handle is not None:
            return handle
        job = self._join(source)
        try:
            return await job.wait(timeout_s=timeout_s, grace_s=grace_s)
        finally:
            self._drop_unwanted(job)

    async def forget(self, content_key: str) -> None:
        """Stop a running ingestion and delete the state from every tier.

        Raises:
            InvalidValueError: The key is not a SHA-256 in hex.
        """
        job = self._jobs.pop(content_key, None)
        if job is not None:
            job.stop(UnavailableError(_DELETED, phase="prefill"))
        deletion = asyncio.create_task(self._delete(content_key, job))
        # A later job for the same content waits for it.
        self._deletions[content_key] = deletion
        await asyncio.shield(deletion)

    @property
    def num_running(self) -> int:
        """Ingestions that wait or run, those of texts that came with a question among them."""
        return len(self._jobs)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that they still have to prefill, as far as they are tokenized."""
        running = [job.progress for job in self._jobs.values()]
        return sum((each.num_tokens or 0) - each.tokens_done for each in running)

    async def is_ready(self) -> bool:
        """Whether work is accepted and a prefill worker answers."""
        return not self._is_closed and await self._worker.is_ready()

    async def close(self) -> None:
        """Stop every job; what is written stays and is resumed after a restart."""
        self._is_closed = True
        jobs = list(self._jobs.values())
        for job in jobs:
            job.stop(UnavailableError("The service is shutting down; send the request again."))
        running = [job.task for job in jobs if job.task is not None]
        await asyncio.gather(*running, *self._deletions.values(), return_exceptions=True)
        await self._recording.close()

    def _ready(self, source: Source) -> StateHandle | None:
        if source.content_key in self._deletions:
            return None
        handle = self._store.peek(source.content_key, self._layout)
        return handle if handle is not None and self._is_current(source, handle) else None

    def _drop_unwanted(self, job: Job) -> None:
        """Stop a job that nobody waits for, or look again when its last caller's grace is over."""
        if job.num_waiters or job.is_kept or job.result.done():
            return
        loop = asyncio.get_running_loop()
        if job.wanted_until > loop.time():
            loop.call_at(job.wanted_until, self._drop_unwanted, job)
            return
        self._remove(job)
        job.stop(CancelledError("Nobody waits for the text any more.", phase="prefill"))

    def _join(self, source: Source) -> Job:
        if self._is_closed:
            raise UnavailableError("The service is shutting down; send the request again.")
        job = self._jobs.get(source.content_key)
        if job is None:
            job = Job(source=source, result=asyncio.get_running_loop().create_future())
            job.task = asyncio.create_task(self._run(job))
            self._jobs[source.content_key] = job
        if isinstance(source, DocumentText) and source.document_id is not None:
            job.is_durable = job.is_kept = True
        return job

    def _remove(self, job: Job) -> None:
        if self._jobs.get(job.source.content_key) is job:
            del self._jobs[job.source.content_key]

    def _is_current(self, source: Source, handle: StateHandle) -> bool:
        return handle.layout.mode == self._prefiller.wanted_mode(source, handle.num_tokens)

    async def _delete(self, content_key: str, job: Job | None) -> None:
        try:
            if job is not None and job.task is not None:
                await asyncio.wait([job.task])
            await self._store.delete(content_key)
        finally:
            if self._deletions.get(content_key) is asyncio.current_task():
                del self._deletions[content_key]

    async def _run(self, job: Job) -> None:
        try:
            with log_context(phase="prefill"):
                handle = await self._ingest(job)
        except asyncio.CancelledError:
            job.fail(CancelledError("The ingestion was cancelled.", phase="prefill"))
            raise
        except OrthrosError as error:
            await self._fail(job, error)
        except Exception as error:
            # The job's edge: whatever happened, its waiters must get an answer.
            logger.exception("document %s: ingestion failed", job.source.content_key[:12])
            wrapped = EngineError(f"Prefill failed: {type(error).__name__}.", phase="prefill")
            wrapped.__cause__ = error
            await self._fail(job, wrapped)
        else:
            job.result.set_result(handle)
        finally:
            self._store.release(job.source.content_key)
            self._remove(job)

    async def _fail(self, job: Job, error: OrthrosError) -> None:
        job.progress = replace(
            job.progress, status="failed", error_code=error.code, error_message=error.message
        )
        try:
            await self._record(job)
        finally:
            job.fail(error)

    async def _record(self, job: Job) -> None:
        if job.is_durable:
            await self._recording.record(job.source.content_key, job.progress)

    async def _ingest(self, job: Job) -> StateHandle:
        async def on_progress(progress: IngestProgress) -> None:
            job.progress = progress
            await self._record(job)

        source = job.source
        deletion = self._deletions.get(source.content_key)
        if deletion is not None:
            await asyncio.wait([deletion])
        handle = await self._stored(source)
        if handle is None:
            await self._record(job)
            document = await self._prefiller.tokenize(source)
            handle = await self._prefiller.prefill(
                document, is_durable=lambda: job.is_durable, on_progress=on_progress
            )
        await self._keep(job, handle)
        return handle

    async def _stored(self, source: Source) -> StateHandle | None:
        handle = await self._store.get(source.content_key, self._layout)
        if handle is None or self._is_current(source, handle):
            return handle
        logger.info(
            "document %s: stored in mode %s, which is not the choice any more; prefilling again",
            source.content_key[:12],
            handle.layout.mode,
        )
        await self._store.delete(source.content_key)
        return None

    async def _keep(self, job: Job, handle: StateHandle) -> None:
        job.progress = IngestProgress(
            status="ready",
            mode=handle.layout.mode,
            num_tokens=handle.num_tokens,
            tokens_done=handle.num_tokens,
            tokens_per_s=job.progress.tokens_per_s,
        )
        is_durable: bool | None = None
        # The catalogue may come to know the text while this job stores it.
        while is_durable is not job.is_durable:
            is_durable = job.is_durable
            await self._store.put(handle, is_durable=is_durable)
            await self._record(job)
