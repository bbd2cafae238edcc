"""What the gateway adds to a request: `POST /v1/answers` in a real server over a stub backend.

The stub answers at once, so what is measured is everything else: HTTP, parsing, validation, the
catalogue, the stored text, admission, citations, serialization. One client with one kept-alive
connection sends one request after the other, over loopback. From the repository root:

    python benchmarks/gateway_overhead.py
    python benchmarks/gateway_overhead.py --base-url http://127.0.0.1:8000 --label "Ray Serve"
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from machine import describe_machine
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers

from orthros_service.documents import DocumentCatalog, TextStore
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

RESULT = Path(__file__).parent / "results" / "gateway_overhead.json"
TARGET_P50_MS = 15.0
PARAGRAPH = "It is a truth universally acknowledged, that a single man must be in want of a wife.\n"
ANSWER = "A single man must be in want of a wife."


class StubBackend:
    """Answers with one delta and one citation, without any work."""

    def __init__(self, catalog: DocumentCatalog) -> None:
        self._catalog = catalog

    async def ingest(self, document: DocumentText) -> None:
        await asyncio.to_thread(self._catalog.record, document.content_key, self._ready())

    async def wait_ready(self, document: DocumentText, *, timeout_s: float) -> IngestProgress:
        return self._ready()

    async def forget(self, content_key: str) -> None:
        pass

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        yield TokenDelta(text=ANSWER, num_tokens=1)
        span = EvidenceSpan(
            document_index=0,
            start_char=0,
            end_char=len(PARAGRAPH) - 1,
            answer_start=0,
            answer_end=len(ANSWER),
            score=1.0,
        )
        yield GenerationFinished(
            text=ANSWER,
            finish_reason="stop",
            document_tokens=1000,
            prompt_tokens=10,
            completion_tokens=1,
            max_tokens=request.sampling.max_tokens,
            evidence=(span,),
        )

    async def cancel(self, request_id: str) -> None:
        pass

    async def model_info(self) -> ModelInfo:
        return ModelInfo(
            name="stub",
            is_converted=False,
            trained_context_tokens=8192,
            full_prefill_max_tokens=8192,
            max_context_tokens=100_000,
            num_parameters=1,
            window=512,
            dtype="float32",
            digest="0" * 64,
        )

    async def is_ready(self) -> bool:
        return True

    @staticmethod
    def _ready() -> IngestProgress:
        return IngestProgress(
            status="ready", mode="full", num_tokens=1000, tokens_done=1000, tokens_per_s=1.0
        )


def stub_app(folder: Path) -> FastAPI:
    """The gateway with its real catalogue and text store over the stub."""
    raw = RawTokenizer(models.BPE(vocab={"<unk>": 0, "<end>": 1}, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.add_special_tokens(["<end>"])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    catalog = DocumentCatalog(f"sqlite:///{folder}/catalog.db")
    metrics = PrometheusMetrics()

    async def metrics_text() -> str:
        return metrics.render()

    return create_app(
        backend=StubBackend(catalog),
        catalog=catalog,
        texts=TextStore(str(folder / "texts")),
        tokenizer=Tokenizer.from_directory(folder),
        settings=Settings(),
        metrics=metrics,
        metrics_text=metrics_text,
    )


@contextlib.contextmanager
def stub_server() -> Iterator[str]:
    """Run this file with --serve in a process of its own; yields its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", str(port), "--folder", folder]
        process = subprocess.Popen(command)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=20)


def wait_ready(client: httpx.Client, path: str, is_ready: Any) -> None:
    """Ask until the answer is the wanted one, for a minute at most."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            response = client.get(path)
            if is_ready(response):
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"{client.base_url}{path} was not ready within a minute")
        time.sleep(0.1)


def timed_ms(client: httpx.Client, method: str, path: str, **more: Any) -> float:
    """Milliseconds of one request that must succeed."""
    started = time.perf_counter()
    response = client.request(method, path, **more)
    elapsed = time.perf_counter() - started
    response.raise_for_status()
    return 1000 * elapsed


def summary(samples: list[float]) -> dict[str, float]:
    """The figures of a result file."""
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return {
        "p50_ms": round(statistics.median(samples), 3),
        "p90_ms": round(cuts[89], 3),
        "p99_ms": round(cuts[98], 3),
        "max_ms": round(max(samples), 3),
    }


def measure(base_url: str, *, num_requests: int, num_warmup: int, num_bytes: int) -> dict[str, Any]:
    """Upload a document of about `num_bytes`, then ask it again and again."""
    with httpx.Client(base_url=base_url, timeout=60) as client:
        wait_ready(client, "/readyz", lambda response: response.status_code == 200)
        text = PARAGRAPH * max(1, num_bytes // len(PARAGRAPH))
        headers = {"Content-Type": "text/plain"}
        uploaded = client.post("/v1/documents", content=text.encode(), headers=headers)
        path = f"/v1/documents/{uploaded.raise_for_status().json()['id']}"
        wait_ready(client, path, lambda response: response.json()["status"] == "ready")
        body = {
            "document_ids": [path.rsplit("/", 1)[1]],
            "question": "What must a single man be in want of?",
            "max_tokens": 1,
        }
        if not client.post("/v1/answers", json=body).raise_for_status().json()["text"]:
            raise SystemExit("the service answers with an empty text; nothing would be measured")
        answers = [
            timed_ms(client, "POST", "/v1/answers", json=body)
            for _ in range(num_warmup + num_requests)
        ][num_warmup:]
        bare = [timed_ms(client, "GET", "/healthz") for _ in range(num_warmup + num_requests)]
        client.delete(path).raise_for_status()
    return {
        "requests": num_requests,
        "warmup": num_warmup,
        "document_bytes": len(text),
        "answers": summary(answers),
        "healthz": summary(bare[num_warmup:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--base-url", help="a running service instead of the stub's own server")
    parser.add_argument("--label", default="uvicorn, one process, stub backend")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--document-bytes", type=int, default=50_000)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        app = stub_app(options.folder)
        uvicorn.run(app, port=options.serve, log_level="warning", access_log=False)
        return
    load = os.getloadavg()[0]
    server = contextlib.nullcontext(options.base_url) if options.base_url else stub_server()
    with server as base_url:
        figures = measure(
            base_url,
            num_requests=options.requests,
            num_warmup=options.warmup,
            num_bytes=options.document_bytes,
        )
    result = {
        "what": "POST /v1/answers, sequential, one kept-alive connection over loopback",
        "server": options.label,
        **describe_machine("fastapi", "starlette", "uvicorn", "httpx", "pydantic", "sqlalchemy"),
        "load_before": round(load, 2),
        "target_p50_ms": TARGET_P50_MS,
        **figures,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    p50_ms = figures["answers"]["p50_ms"]
    if p50_ms > TARGET_P50_MS:
        raise SystemExit(f"p50 {p50_ms} ms is over the target of {TARGET_P50_MS} ms")


if __name__ == "__main__":
    main()
