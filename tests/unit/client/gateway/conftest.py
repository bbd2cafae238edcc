"""The real gateway on a real socket, over workers that read and answer by rote."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvicorn

from orthros_service.documents import DocumentCatalog, TextStore
from orthros_service.errors import EngineError
from orthros_service.gateway import create_app
from orthros_service.settings import Settings
from orthros_service.telemetry import PrometheusMetrics
from orthros_service.tokenization import Tokenizer
from orthros_service.types import (
    DocumentText,
    EvidenceSpan,
    GenerationEvent,
    GenerationFinished,
    GenerationRequest,
    IngestProgress,
    ModelInfo,
    TokenDelta,
)

STEPS = 4
ANSWER = ("Call ", "me ", "Ish\x1b", "mael\u2028.")


class RoteWorkers:
    """A `GenerationBackend`: ingests in steps, answers the same words, fails where the text says.

    Args:
        catalog: Where progress is recorded.
    """

    def __init__(self, catalog: DocumentCatalog) -> None:
        self.catalog = catalog
        self.tasks: set[asyncio.Task[None]] = set()
        self.cancelled: list[str] = []
        self.questions: list[str] = []

    async def ingest(self, document: DocumentText) -> None:
        task = asyncio.create_task(self._ingest(document))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _ingest(self, document: DocumentText) -> None:
        for step in range(STEPS + 1):
            status = "ingesting"
            if step == STEPS:
                status = "failed" if "FAIL" in document.text else "ready"
            progress = IngestProgress(
                status=status,
                mode="full" if document.mode == "auto" else document.mode,
                num_tokens=STEPS,
                tokens_done=step,
                tokens_per_s=8.0,
                error_code="engine_error" if status == "failed" else None,
                error_message="It says FAIL." if status == "failed" else None,
            )
            await asyncio.to_thread(self.catalog.record, document.content_key, progress)
            await asyncio.sleep(0.1)

    async def forget(self, content_key: str) -> None:
        """Nothing is kept."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        question = request.messages[-1].content
        self.questions.append(question)
        for text in ANSWER:
            yield TokenDelta(text=text, num_tokens=1)
            await asyncio.sleep(0.02)
            if "break" in question:
                raise EngineError("The engine broke.", phase="decode")
            if "for ever" in question:
                await asyncio.Event().wait()
        evidence = EvidenceSpan(
            document_index=0, start_char=8, end_char=15, answer_start=0, answer_end=4, score=0.5
        )
        yield GenerationFinished(
            text="".join(ANSWER),
            finish_reason="stop",
            document_tokens=4,
            prompt_tokens=2,
            completion_tokens=4,
            max_tokens=request.sampling.max_tokens,
            evidence=(evidence,) if request.wants_citations else (),
        )

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def model_info(self) -> ModelInfo:
        return ModelInfo(
            name="rote",
            is_converted=False,
            trained_context_tokens=8192,
            full_prefill_max_tokens=8192,
            max_context_tokens=8192,
            num_parameters=1,
            window=512,
            dtype="float32",
            digest="0",
        )

    async def is_ready(self) -> bool:
        return True


class Gateway:
    """The running gateway: its address and its workers."""

    def __init__(self, url: str, workers: RoteWorkers) -> None:
        self.url = url
        self.workers = workers


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    catalog = DocumentCatalog(f"sqlite:///{folder}/documents.db")
    metrics = PrometheusMetrics()
    workers = RoteWorkers(catalog)

    async def metrics_text() -> str:
        return metrics.render()

    app = create_app(
        backend=workers,
        catalog=catalog,
        texts=TextStore(str(folder / "texts")),
        tokenizer=Tokenizer.from_directory(tiny_tokenizer_dir),
        settings=Settings(),
        metrics=metrics,
        metrics_text=metrics_text,
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Gateway(f"http://127.0.0.1:{port}", workers)
    server.should_exit = True
    thread.join()
    catalog.close()
