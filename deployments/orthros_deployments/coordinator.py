"""The coordinator replica: runs ingestions, owns every segment, hands out states."""

import asyncio
import logging
from dataclasses import replace

from ray.serve.handle import DeploymentHandle

from orthros_deployments.descriptions import ServiceDescription
from orthros_deployments.ingestion_metrics import MeasuredRecorder
from orthros_deployments.leases import POLL_GRACE_S
from orthros_deployments.metrics import MetricsPage, ReplicaMetrics
from orthros_deployments.prefill_replicas import PrefillReplicas
from orthros_deployments.replica_logging import configure_replica_logging
from orthros_deployments.transport import RayTransport
from orthros_service.documents import DocumentCatalog, DocumentRow, TextStore
from orthros_service.errors import OrthrosError
from orthros_service.ingest import Ingestor, Source
from orthros_service.settings import Settings
from orthros_service.state.store import StateStore
from orthros_service.state.types import StateHandle, StateLayout
from orthros_service.tokenization import PromptFormat, Tokenizer
from orthros_service.types import DocumentText

logger = logging.getLogger(__name__)

_MEASURE_EVERY_S = 15.0


class Coordinator:
    """One per service. Its segments live as long as it does, the files behind them longer.

    Args:
        settings: All settings.
        prefill: Handle of the prefill deployment.
    """

    # Serve awaits an asynchronous constructor, and the ingestor must be made inside the event loop.
    async def __init__(  # type: ignore[misc]
        self, settings: Settings, prefill: DeploymentHandle[object]
    ) -> None:
        configure_replica_logging(settings.log)
        self._metrics = ReplicaMetrics()
        self._catalog = DocumentCatalog(settings.documents.database_url)
        self._texts = TextStore(settings.documents.text_uri)
        prompt_format = PromptFormat(Tokenizer.from_directory(settings.model.directory))
        workers = PrefillReplicas(prefill)
        worker = await workers.describe()
        self._description = ServiceDescription(settings=settings, worker=worker)
        self._layout: StateLayout = worker.layout
        transport = RayTransport()
        self._store = StateStore(
            settings=settings.state, transport=transport, header_ids=prompt_format.header_ids
        )
        self._recorder = MeasuredRecorder(self._catalog, self._metrics)
        self._ingestor = Ingestor(
            prompt_format=prompt_format,
            worker=workers,
            store=self._store,
            transport=transport,
            layout=worker.layout,
            full_prefill_max_tokens=worker.model.full_prefill_max_tokens,
            max_context_tokens=worker.model.max_context_tokens,
            max_document_tokens=settings.documents.max_tokens,
            settings=settings.prefill,
            recorder=self._recorder,
            num_workers=settings.deployment.num_prefill_workers,
        )
        self._background = (
            asyncio.create_task(self._resume()),
            asyncio.create_task(self._measure()),
        )

    async def describe(self) -> ServiceDescription:
        """Settings, model and layout that the whole service agrees on."""
        return self._description

    async def start(self, document: DocumentText) -> None:
        """Start ingesting a document, or join the running job; returns at once."""
        await self._ingestor.start(document)

    async def poll(self, source: Source, timeout_s: float, is_first: bool) -> StateHandle | None:
        """Ingest if need be and wait; the handle's segments are object references.

        The receiver's copies of them keep the objects alive too, as long as this process lives.

        Args:
            source: What is wanted.
            timeout_s: Seconds to wait in this call.
            is_first: Whether the caller has not asked before.

        Returns:
            None if it is not ready yet. Whoever still wants it then polls again at once; a caller
            that does not counts as gone, and a text that only it wants is given up.
        """
        if is_first:
            is_hit = self._store.peek(source.content_key, self._layout) is not None
            result = "hit" if is_hit else "miss"
            self._metrics.increment("orthros_state_lookups_total", tier="memory", result=result)
        return await self._ingestor.poll(source, timeout_s=timeout_s, grace_s=POLL_GRACE_S)

    async def forget(self, content_key: str) -> None:
        """Stop a running ingestion and delete the state from every tier."""
        await self._ingestor.forget(content_key)
        self._recorder.forget(content_key)

    async def is_ready(self) -> bool:
        """Whether work is accepted and a prefill replica answers."""
        return await self._ingestor.is_ready()

    async def metrics_page(self) -> MetricsPage:
        """This replica's metrics."""
        self._measure_ingestions()
        return self._metrics.page()

    async def _resume(self) -> None:
        """Take up what an earlier process left unfinished, oldest first."""
        try:
            rows = await asyncio.to_thread(self._catalog.unfinished)
        except OrthrosError as error:
            logger.warning("unfinished ingestions cannot be looked up: %s", error.message)
            return
        for row in rows:
            try:
                await self._resume_one(row)
            except OrthrosError as error:
                await self._fail(row, error)
        if rows:
            logger.info("%d unfinished ingestions were taken up again", len(rows))

    async def _resume_one(self, row: DocumentRow) -> None:
        text = await asyncio.to_thread(self._texts.get, row.content_key)
        await self._ingestor.start(
            DocumentText(
                content_key=row.content_key,
                text=text,
                mode=row.mode_choice,
                document_id=row.document_id,
            )
        )

    async def _fail(self, row: DocumentRow, error: OrthrosError) -> None:
        logger.warning("document %s cannot be taken up again: %s", row.document_id, error.message)
        failed = replace(
            row.progress, status="failed", error_code=error.code, error_message=error.message
        )
        try:
            await asyncio.to_thread(self._catalog.record, row.content_key, failed)
        except OrthrosError as failure:
            logger.warning("the failure was not recorded: %s", failure.message)

    def _measure_ingestions(self) -> None:
        self._metrics.set("orthros_ingestions_running", self._ingestor.num_running)
        self._metrics.set("orthros_pending_prefill_tokens", self._ingestor.num_pending_tokens)

    async def _measure(self) -> None:
        while True:
            self._measure_ingestions()
            try:
                stats = await self._store.stats()
            except OSError as error:
                logger.warning("the stored states cannot be counted: %s", error)
            else:
                self._metrics.set("orthros_state_bytes", stats.memory_bytes, tier="memory")
                self._metrics.set("orthros_state_bytes", stats.disk_bytes, tier="disk")
            await asyncio.sleep(_MEASURE_EVERY_S)
