"""The coordinator replica: runs ingestions, owns every segment, hands out states."""

import asyncio
import logging
from collections.abc import Sequence

from ray.serve.handle import DeploymentHandle

from orthros_deployments.remote_errors import orthros_errors
from orthros_deployments.transport import RayTransport
from orthros_deployments.worker_description import ServiceDescription, WorkerDescription
from orthros_service.documents import DocumentCatalog, DocumentRow, TextStore
from orthros_service.engine.types import PrefillStep
from orthros_service.errors import OrthrosError
from orthros_service.ingest import Ingestor, Source
from orthros_service.settings import Settings
from orthros_service.state.store import StateStore
from orthros_service.state.types import SegmentRef, StateHandle
from orthros_service.telemetry import configure_logging
from orthros_service.tokenization import PromptFormat, Tokenizer
from orthros_service.types import DocumentText, IngestProgress

logger = logging.getLogger(__name__)


class PrefillReplicas:
    """The prefill replicas as one worker; Serve chooses the replica of each step."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def step(self, step: PrefillStep, context: Sequence[SegmentRef]) -> SegmentRef:
        """Compute one segment; its reference is owned by this process, not by the replica.

        Raises:
            OrthrosError: The step failed; retryable when the replica died.
        """
        response = self._handle.step.remote(step, list(context))
        try:
            with orthros_errors("prefill"):
                # Awaiting the response itself would give a copy of the value without its reference.
                ref = await response._to_object_ref()
                await ref
        except asyncio.CancelledError:
            response.cancel()
            raise
        return ref

    async def is_ready(self) -> bool:
        """Whether a replica answers."""
        with orthros_errors("prefill"):
            return bool(await self._handle.is_ready.remote())

    async def describe(self) -> WorkerDescription:
        """What the replicas have loaded; waits for the first of them."""
        with orthros_errors("prefill"):
            described = await self._handle.describe.remote()
        assert isinstance(described, WorkerDescription)
        return described


class Coordinator:
    """One per service: the segments that it owns live as long as it does, the files behind them longer.

    Args:
        settings: All settings.
        prefill: Handle of the prefill deployment.
    """

    async def __init__(self, settings: Settings, prefill: DeploymentHandle) -> None:
        configure_logging(settings.log)
        self._catalog = DocumentCatalog(settings.documents.database_url)
        self._texts = TextStore(settings.documents.text_uri)
        prompt_format = PromptFormat(Tokenizer.from_directory(settings.model.directory))
        workers = PrefillReplicas(prefill)
        worker = await workers.describe()
        self._description = ServiceDescription(settings=settings, worker=worker)
        transport = RayTransport()
        self._ingestor = Ingestor(
            prompt_format=prompt_format,
            worker=workers,
            store=StateStore(
                settings=settings.state, transport=transport, header_ids=prompt_format.header_ids
            ),
            transport=transport,
            layout=worker.layout,
            full_prefill_max_tokens=worker.model.full_prefill_max_tokens,
            max_context_tokens=worker.model.max_context_tokens,
            max_document_tokens=settings.documents.max_tokens,
            settings=settings.prefill,
            recorder=self._catalog,
            num_workers=settings.deployment.num_prefill_workers,
        )
        self._resuming = asyncio.create_task(self._resume())

    async def describe(self) -> ServiceDescription:
        """Settings, model and layout that the whole service agrees on."""
        return self._description

    async def start(self, document: DocumentText) -> None:
        """Start ingesting a document, or join the running job; returns at once."""
        await self._ingestor.start(document)

    async def wait_ready(self, source: Source, timeout_s: float) -> StateHandle:
        """Ingest if need be and wait; the handle's segments are object references.

        They keep their objects alive in the receiver as well, as long as this process lives.
        """
        return await self._ingestor.wait_ready(source, timeout_s=timeout_s)

    async def forget(self, content_key: str) -> None:
        """Stop a running ingestion and delete the state from every tier."""
        await self._ingestor.forget(content_key)

    async def is_ready(self) -> bool:
        """Whether work is accepted and a prefill replica answers."""
        return await self._ingestor.is_ready()

    async def _resume(self) -> None:
        """Take up what an earlier process left unfinished, oldest first."""
        try:
            rows = await asyncio.to_thread(self._catalog.unfinished)
        except OrthrosError as error:
            logger.warning("unfinished ingestions cannot be looked up: %s", error.message)
            return
        for row in rows:
            await self._resume_one(row)
        if rows:
            logger.info("%d unfinished ingestions were taken up again", len(rows))

    async def _resume_one(self, row: DocumentRow) -> None:
        try:
            text = await asyncio.to_thread(self._texts.get, row.content_key)
            document = DocumentText(
                content_key=row.content_key,
                text=text,
                mode=row.mode_choice,
                document_id=row.document_id,
            )
            await self._ingestor.start(document)
        except OrthrosError as error:
            logger.warning("document %s cannot be resumed: %s", row.document_id, error.code)
            failed = IngestProgress(
                status="failed",
                mode=row.progress.mode,
                num_tokens=row.progress.num_tokens,
                tokens_done=row.progress.tokens_done,
                tokens_per_s=None,
                error_code=error.code,
                error_message=error.message,
            )
            await asyncio.to_thread(self._catalog.record, row.content_key, failed)
