"""A batch job on a real Ray cluster whose processors are all taken, with a worker that dies."""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from orthros_service.errors import EngineError, UnavailableError
from orthros_service.jobs import JobFailedError, build_spec, make_plan
from orthros_service.types import GenerationFinished, ModelInfo

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.ray,
    # Ray leaves sockets, files and processes to its own shutdown hooks.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # Its modules use what pydantic and others have deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NUM_ROWS = 200
BAD = {3: None, 50: "", 51: " \u200b", 52: "nul\0", 120: "engine fails", 121: "boom", 199: None}
CODES = {
    3: "null_document",
    50: "empty_document",
    51: "empty_document",
    52: "invalid_text",
    120: "engine_error",
    121: "engine_error",
    199: "null_document",
}
CRASHING_ROW = 77


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    owns = not ray.is_initialized()
    if owns:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    if owns:
        ray.shutdown()


@pytest.fixture
def taken_processors(cluster: None) -> Iterator[None]:
    """Leave no processor to the job, as a service does that has reserved them all."""
    hold = ray.remote(_Hold).options(num_cpus=ray.available_resources().get("CPU", 0)).remote()
    ray.get(hold.ping.remote())
    assert ray.available_resources().get("CPU", 0) == 0
    yield
    ray.kill(hold)


class _Hold:
    def ping(self) -> None:
        pass


def _open_fake(folder: Path) -> Callable[[], Any]:
    """A backend whose class goes to the workers by value: they cannot import a test."""

    def note(text: str) -> None:
        with (folder / "calls").open("a") as calls:
            calls.write(f"{text}\n")
        if text == f"document {CRASHING_ROW}" and not (folder / "crashed").exists():
            (folder / "crashed").touch()
            os._exit(1)

    class Fake:
        async def model_info(self) -> ModelInfo:
            return ModelInfo(
                name="fake",
                is_converted=False,
                trained_context_tokens=1,
                full_prefill_max_tokens=1,
                max_context_tokens=1,
                num_parameters=1,
                window=1,
                dtype="float32",
                digest="0",
            )

        async def generate(self, request):
            text = request.documents[0].text
            note(text)
            if text.startswith("engine"):
                raise EngineError("The engine failed.")
            if text.startswith("boom"):
                raise RuntimeError("boom")
            await asyncio.sleep(0.005)
            yield GenerationFinished(
                text=f"about {text}",
                finish_reason="stop",
                document_tokens=2,
                prompt_tokens=3,
                completion_tokens=4,
                max_tokens=64,
            )

    return lambda: Fake()


def _write_input(folder: Path) -> None:
    texts = [BAD.get(index, f"document {index}") for index in range(NUM_ROWS)]
    table = pa.table(
        {
            "id": range(NUM_ROWS),
            "text": texts,
            "kept": pa.array([f"v{i % 3}" for i in range(NUM_ROWS)], pa.string_view()),
            "nested": [[{"a": i}] for i in range(NUM_ROWS)],
        }
    )
    (folder / "sub").mkdir(parents=True)
    pq.write_table(table.slice(0, 90), folder / "a.parquet", row_group_size=40)
    pq.write_table(table.slice(90, 100), folder / "sub" / "b.parquet")
    for index in range(190, NUM_ROWS):
        pq.write_table(table.slice(index, 1), folder / "sub" / f"c{index}.parquet")


@pytest.mark.timeout(120)
def test_each_row_comes_out_once_though_processors_are_taken_and_the_actor_dies(
    tmp_path, taken_processors
):
    from orthros_deployments.batch import run_batch

    _write_input(tmp_path / "in")
    spec = build_spec(
        input=str(tmp_path / "in"),
        output=str(tmp_path / "out"),
        question="What?",
        id_column="id",
        chunk_rows=16,
    )
    seen = []

    report = run_batch(
        spec,
        make_plan(spec),
        open_backend=_open_fake(tmp_path),
        on_progress=seen.append,
    )

    assert (tmp_path / "crashed").exists()
    # Chunks that were written are not answered again; the four that an actor holds may be.
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) - len(set(calls)) <= 4 * 16
    rows = sorted(
        pads.dataset(tmp_path / "out", format="parquet").to_table().to_pylist(),
        key=lambda row: row["id"],
    )
    assert [row["id"] for row in rows] == list(range(NUM_ROWS))
    assert len({(row["_source_file"], row["_source_row"]) for row in rows}) == NUM_ROWS
    assert {row["id"]: row["error_code"] for row in rows if row["status"] == "error"} == CODES
    for row in rows:
        assert row["kept"] == f"v{row['id'] % 3}"
        assert row["nested"] == [{"a": row["id"]}]
        if row["status"] == "ok":
            assert row["answer"] == f"about document {row['id']}"
    assert report.rows_in == report.rows_out == NUM_ROWS
    assert sum(report.errors_by_code.values()) == len(BAD)
    assert report.completion_tokens == 4 * (NUM_ROWS - len(BAD))
    assert report.files_out > NUM_ROWS // 16
    assert seen[-1].num_rows >= NUM_ROWS
    assert (tmp_path / "out" / "_SUCCESS").is_file()


def test_a_backend_that_does_not_answer_fails_the_job_before_its_rows(tmp_path, cluster):
    from orthros_deployments.batch import run_batch

    _write_input(tmp_path / "in")
    spec = build_spec(input=str(tmp_path / "in"), output=str(tmp_path / "out"), summarize=True)

    class Dead:
        async def model_info(self):
            raise UnavailableError("No service.")

    with pytest.raises(UnavailableError):
        run_batch(spec, make_plan(spec), open_backend=lambda: Dead())
    assert not list((tmp_path).glob("out/*.parquet"))
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_an_output_that_cannot_be_written_fails_the_job_with_the_cause(tmp_path, cluster):
    from orthros_deployments.batch import run_batch

    _write_input(tmp_path / "in")
    spec = build_spec(input=str(tmp_path / "in"), output=str(tmp_path / "out"), summarize=True)
    driver, open_fake = os.getpid(), _open_fake(tmp_path)

    def open_backend():
        if os.getpid() != driver:
            shutil.rmtree(tmp_path / "out")
        return open_fake()

    (tmp_path / "crashed").touch()
    with pytest.raises(JobFailedError, match=r"Cause: FileNotFoundError: .*part-000000-00000"):
        run_batch(spec, make_plan(spec), open_backend=open_backend)
    assert not (tmp_path / "out" / "_SUCCESS").exists()
