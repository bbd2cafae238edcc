"""A fake backend, and a job run in this process: all of a batch job but Ray."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orthros_service.errors import ContextTooLongError, EngineError, OverloadedError
from orthros_service.jobs.output import finish_output, prepare_output, verify_output, write_empty
from orthros_service.jobs.plan import JobPlan, make_plan
from orthros_service.jobs.reading import Chunk, ChunkReader
from orthros_service.jobs.report import JobReport, build_report
from orthros_service.jobs.row_types import RowTask
from orthros_service.jobs.spec import JobSpec, build_spec
from orthros_service.jobs.worker import Advance, ChunkWorker
from orthros_service.types import (
    EvidenceSpan,
    GenerationEvent,
    GenerationFinished,
    GenerationRequest,
    ModelInfo,
    Timings,
    TokenDelta,
)

MODEL = ModelInfo(
    name="fake-model",
    is_converted=False,
    trained_context_tokens=8192,
    full_prefill_max_tokens=8192,
    max_context_tokens=1_000_000,
    num_parameters=1,
    window=16,
    dtype="float32",
    digest="0" * 64,
)


@dataclass
class FakeBackend:
    """Answers with the first words of the document; a document can ask for trouble by its words."""

    requests: list[GenerationRequest] = field(default_factory=list)
    num_failures: dict[str, int] = field(default_factory=dict)
    answer: Callable[[GenerationRequest], str] = lambda request: (
        f"{request.messages[-1].content} -> {request.documents[0].text[:20]}"
    )
    num_running: int = 0
    most_running: int = 0
    num_closed: int = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        self.requests.append(request)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0)
            await self._trouble(request.documents[0].text)
            text = self.answer(request)
            yield TokenDelta(text=text, num_tokens=2)
            yield _finished(request, text)
        finally:
            self.num_running -= 1
            self.num_closed += 1

    async def _trouble(self, text: str) -> None:
        if text.startswith("boom"):
            raise RuntimeError("boom \ud83d")
        if text.startswith("engine"):
            raise EngineError("The engine failed.", phase="decode")
        if text.startswith("too long"):
            raise ContextTooLongError("Too long.", limit=1, actual=2)
        if text.startswith("slow"):
            await asyncio.sleep(60)
        if text.startswith("cancelled"):
            raise asyncio.CancelledError
        if text.startswith("busy") and self._first_times(text, 3):
            raise OverloadedError("Busy.", retry_after_s=0.001)

    def _first_times(self, text: str, times: int) -> bool:
        self.num_failures[text] = self.num_failures.get(text, 0) + 1
        return self.num_failures[text] <= times


def _finished(request: GenerationRequest, text: str) -> GenerationFinished:
    document = request.documents[0].text
    span = EvidenceSpan(
        document_index=0,
        start_char=0,
        end_char=min(6, len(document)),
        answer_start=0,
        answer_end=1,
        score=1.0,
    )
    return GenerationFinished(
        text=text,
        finish_reason="stop",
        document_tokens=len(document.split()),
        prompt_tokens=7,
        completion_tokens=2,
        max_tokens=request.sampling.max_tokens,
        evidence=(span,) if request.wants_citations else (),
        timings=Timings(queue_s=0.1, prefill_s=0.2, decode_s=0.3),
    )


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def model() -> ModelInfo:
    return MODEL


@dataclass(frozen=True)
class FinishedJob:
    spec: JobSpec
    plan: JobPlan
    report: JobReport
    advances: list[Advance]

    @property
    def output(self) -> Path:
        return self.spec.output_path

    def table(self) -> Any:
        """The whole output, in the order of its files."""
        paths = sorted(self.output.glob("part-*.parquet"))
        return pa.concat_tables([pq.read_table(path, partitioning=None) for path in paths])

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the output in the order of the input."""
        rows: list[dict[str, Any]] = self.table().to_pylist()
        return sorted(rows, key=lambda row: (row["_source_file"], row["_source_row"]))

    def written_report(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.output / "_job" / "report.json").read_text())
        return content


RunJob = Callable[..., FinishedJob]


@pytest.fixture
def run_job(tmp_path_factory: pytest.TempPathFactory, backend: FakeBackend) -> RunJob:
    """Run a job on the fake backend: `run_job(input, **fields of the spec)`."""

    def run(source: Path | str, **values: Any) -> FinishedJob:
        values.setdefault("output", str(tmp_path_factory.mktemp("output") / "out"))
        if not values.keys() & {"question", "question_column", "summarize"}:
            values["question"] = "What?"
        spec = build_spec(input=str(source), **values)
        plan = make_plan(spec)
        prepare_output(spec.output_path)
        advances: list[Advance] = []
        with _worker(spec, plan, backend, advances) as worker, ThreadPoolExecutor(2) as pool:
            receipts = list(pool.map(worker.run, _chunks(spec, plan)))
        if not receipts:
            receipts = [write_empty(spec.output_path, plan)]
        verify_output(spec.output_path, plan=plan, receipts=receipts)
        report = build_report(
            spec, plan=plan, receipts=receipts, model=MODEL, started_at="2025", seconds=2.0
        )
        finish_output(spec.output_path, report=report.model_dump_json())
        return FinishedJob(spec, plan, report, advances)

    return run


@contextmanager
def _worker(
    spec: JobSpec, plan: JobPlan, backend: FakeBackend, advances: list[Advance]
) -> Iterator[ChunkWorker]:
    worker = ChunkWorker(
        lambda: backend,  # type: ignore[arg-type,return-value]
        task=RowTask.of(spec, plan),
        model=MODEL,
        output=spec.output_path,
        concurrency=spec.concurrency,
        on_advance=advances.append,
    )
    try:
        yield worker
    finally:
        worker.close()


def _chunks(spec: JobSpec, plan: JobPlan) -> Iterator[Chunk]:
    reader = ChunkReader.of(spec, plan)
    for unit in plan.units:
        for chunk in reader.read(unit):
            # As between processes.
            yield Chunk.from_ipc(chunk.name, chunk.to_ipc())


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write columns as a Parquet file under `tmp_path/in`; returns the folder."""

    def write_file(
        name: str = "a.parquet", *, row_group_size: int | None = None, **columns: Any
    ) -> Path:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
        return tmp_path / "in"

    return write_file


@pytest.fixture
def invalid_string() -> Any:
    """Two values of a string array; the first is no UTF-8."""
    data = pa.array([b"ok\xff\xfebad", b"fine"])
    return pa.Array.from_buffers(pa.string(), 2, data.buffers())
