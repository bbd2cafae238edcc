"""The gateway over the real catalogue, text store and tokenizer; only the workers are a stub."""

import asyncio
import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from orthros_service.documents import DocumentCatalog, TextStore
from orthros_service.gateway import create_app
from orthros_service.settings import DocumentSettings, GatewaySettings, Settings
from orthros_service.telemetry import PrometheusMetrics
from orthros_service.tokenization import Tokenizer
from orthros_service.types import (
    DocumentText,
    EvidenceSpan,
    FinishReason,
    GenerationEvent,
    GenerationFinished,
    GenerationRequest,
    IngestProgress,
    ModelInfo,
    Timings,
    TokenDelta,
)

MODEL = ModelInfo(
    name="tiny-model",
    is_converted=False,
    trained_context_tokens=8192,
    full_prefill_max_tokens=200,
    max_context_tokens=100_000,
    num_parameters=1000,
    window=512,
    dtype="float32",
    digest="ab" * 32,
)
READY = IngestProgress(
    status="ready", mode="full", num_tokens=50, tokens_done=50, tokens_per_s=100.0
)
HANG = "hang"
"""A step of the stub's script: wait until `is_open`, or the generation is closed."""


@dataclass
class StubBackend:
    """A backend that answers by script: texts are tokens, exceptions are raised, HANG waits.

    Ingestion sets `progress` in the catalogue at once; set it to an unfinished one to see that.
    """

    catalog: DocumentCatalog
    script: list[str | Exception] = field(default_factory=lambda: ["Mr. ", "Darcy", "."])
    progress: IngestProgress = READY
    evidence: tuple[EvidenceSpan, ...] = ()
    finish_reason: FinishReason = "stop"
    max_tokens: int | None = None
    timings: Timings = field(default_factory=Timings)
    ingest_error: Exception | None = None
    is_up: bool = True
    omits_result: bool = False
    requests: list[GenerationRequest] = field(default_factory=list)
    ingested: list[DocumentText] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_active: int = 0
    is_open: bool = False

    async def ingest(self, document: DocumentText) -> None:
        if self.ingest_error is not None:
            raise self.ingest_error
        self.ingested.append(document)
        await asyncio.to_thread(self.catalog.record, document.content_key, self.progress)

    async def forget(self, content_key: str) -> None:
        self.forgotten.append(content_key)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        self.requests.append(request)
        self.num_active += 1
        try:
            text = ""
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if step == HANG:
                    while not self.is_open:  # noqa: ASYNC110 - opened from another thread
                        await asyncio.sleep(0.01)
                    continue
                await asyncio.sleep(0)
                text += step
                yield TokenDelta(text=step, num_tokens=1)
            if not self.omits_result:
                yield self._finished(request, text)
        finally:
            self.num_active -= 1

    def _finished(self, request: GenerationRequest, text: str) -> GenerationFinished:
        return GenerationFinished(
            text=text,
            finish_reason=self.finish_reason,
            document_tokens=50 * len(request.documents),
            prompt_tokens=12,
            completion_tokens=len(self.script),
            max_tokens=self.max_tokens or request.sampling.max_tokens,
            is_linear=self.progress.mode == "linear",
            evidence=self.evidence,
            timings=self.timings,
        )

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def model_info(self) -> ModelInfo:
        return MODEL

    async def is_ready(self) -> bool:
        return self.is_up


@dataclass
class Service:
    """One gateway and what stands behind it."""

    app: FastAPI
    backend: StubBackend
    catalog: DocumentCatalog
    texts: TextStore
    metrics: PrometheusMetrics
    client: httpx.AsyncClient

    async def upload(self, text: str = "Mr. Darcy owns Pemberley.", **params: str) -> str:
        response = await self.client.post(
            "/v1/documents",
            content=text.encode(),
            headers={"Content-Type": "text/plain"},
            params=params,
        )
        assert response.status_code == 202, response.text
        document_id: str = response.json()["id"]
        return document_id

    def metric(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.metrics.render()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0


@pytest.fixture(scope="session")
def byte_tokenizer(tiny_tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_tokenizer_dir)


@pytest.fixture
def gateway_settings() -> Settings:
    """Small limits; a test module overrides this fixture to change them."""
    return Settings(
        documents=DocumentSettings(max_bytes=100_000),
        gateway=GatewaySettings(
            max_json_bytes=200_000, max_concurrent_requests=2, max_waiting_requests=2
        ),
    )


@pytest.fixture(scope="session")
def empty_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database whose tables exist: creating them costs more than most tests here."""
    path = tmp_path_factory.mktemp("catalog") / "empty.db"
    DocumentCatalog(f"sqlite:///{path}").close()
    return path


@pytest.fixture
async def service(
    tmp_path: Path, empty_catalog: Path, byte_tokenizer: Tokenizer, gateway_settings: Settings
) -> AsyncIterator[Service]:
    shutil.copy(empty_catalog, tmp_path / "catalog.db")
    catalog = DocumentCatalog(f"sqlite:///{tmp_path}/catalog.db")
    texts = TextStore(str(tmp_path / "texts"))
    metrics = PrometheusMetrics()
    backend = StubBackend(catalog)

    async def metrics_text() -> str:
        return metrics.render()

    app = create_app(
        backend=backend,
        catalog=catalog,
        texts=texts,
        tokenizer=byte_tokenizer,
        settings=gateway_settings,
        metrics=metrics,
        metrics_text=metrics_text,
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield Service(app, backend, catalog, texts, metrics, client)
    catalog.close()


@pytest.fixture
def serve() -> Iterator[Callable[[FastAPI], str]]:
    """A function that runs an app in a real server on a free port and returns its base URL."""
    with contextlib.ExitStack() as stack:

        def start(app: FastAPI) -> str:
            listener = socket.create_server(("127.0.0.1", 0))
            config = uvicorn.Config(app, log_config=None, lifespan="off", access_log=False)
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()

            def stop() -> None:
                server.should_exit = True
                thread.join(timeout=10)
                assert not thread.is_alive(), "the server did not stop"
                listener.close()

            stack.callback(stop)
            while not server.started:
                time.sleep(0.01)
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start


def _sse_events(text: str) -> list[tuple[str | None, Any]]:
    events: list[tuple[str | None, Any]] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        assert len(fields) == len(lines), f"a field is repeated in {block!r}"
        data = fields["data"]
        events.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return events


@pytest.fixture(scope="session")
def sse_events() -> Callable[[str], list[tuple[str | None, Any]]]:
    """A function that splits a stream by LF only into (event name, parsed data)."""
    return _sse_events
