"""Batch jobs on Ray Data: read tasks -> one actor that answers and writes -> receipts.

A Ray Data row is one whole chunk of the input (`orthros_service.jobs.reading.Chunk`), so that
neither splitting nor merging of blocks can touch the rows inside or their types. The actor writes a
chunk as soon as it is answered: what is done stays done, however long the rest takes. No stage
reserves processors, since the deployments that do the work may hold them all.
"""

import asyncio
import json
import logging
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext, Dataset, TaskPoolStrategy
from ray.exceptions import RayError

from orthros_deployments.backend import connect_backend
from orthros_service.jobs.failures import JobFailedError
from orthros_service.jobs.output import (
    Receipt,
    finish_output,
    prepare_output,
    verify_output,
    write_empty,
)
from orthros_service.jobs.plan import JobPlan, ReadUnit, RowRange
from orthros_service.jobs.reading import Chunk, ChunkReader
from orthros_service.jobs.report import JobReport, build_report
from orthros_service.jobs.row_types import RowTask
from orthros_service.jobs.spec import JobSpec
from orthros_service.jobs.worker import Advance, ChunkWorker
from orthros_service.types import GenerationBackend, ModelInfo

OpenBackend = Callable[[], GenerationBackend]

# Unlike the number of actors, or Ray Data would fuse both stages and repeat whole reads.
_NUM_READERS = 2
_NUM_ACTORS = 1
_NUM_ACTOR_CALLS = 2
_LOOK_EVERY_S = 0.5
_MESSAGE_CHARS = 1000
_ERROR_LINE = re.compile(r"^(?!ray\.)[\w.]*(?:Error|Exception): .+$", re.MULTILINE)
_CHUNK_SCHEMA = pa.schema([("name", pa.string()), ("chunk", pa.large_binary())])
_RECEIPT_SCHEMA = pa.schema([("receipt", pa.string())])


def run_batch(
    spec: JobSpec,
    plan: JobPlan,
    *,
    open_backend: OpenBackend = connect_backend,
    on_progress: Callable[[Advance], None] | None = None,
) -> JobReport:
    """Run a planned job on the Ray cluster that this process is connected to.

    Args:
        spec: What to do.
        plan: What `make_plan` found for it.
        open_backend: Connects to the workers; called here and in the actor, so it is pickled.
        on_progress: Told about twice a second how far the job is, from a thread of its own.

    Returns:
        The report, which also lies in the output folder.

    Raises:
        JobFailedError: The job stopped early, or its output does not hold each row exactly once.
        OrthrosError: The backend does not answer.
    """
    model = asyncio.run(_ask_model(open_backend))
    try:
        return _run(spec, plan, open_backend=open_backend, model=model, on_progress=on_progress)
    except OSError as error:
        raise JobFailedError(f"The output cannot be written or read back: {error}.") from error


async def _ask_model(open_backend: OpenBackend) -> ModelInfo:
    return await open_backend().model_info()


def _run(
    spec: JobSpec,
    plan: JobPlan,
    *,
    open_backend: OpenBackend,
    model: ModelInfo,
    on_progress: Callable[[Advance], None] | None,
) -> JobReport:
    started_at, started = datetime.now(UTC), time.monotonic()
    output = spec.output_path
    prepare_output(output)
    board = ray.remote(num_cpus=0)(_Board).remote()
    with _watched(board, on_progress):
        receipts = list(
            _run_stages(spec, plan, open_backend=open_backend, model=model, board=board)
        )
    if not receipts:
        receipts = [write_empty(output, plan)]
    verify_output(output, plan=plan, receipts=receipts)
    report = build_report(
        spec,
        plan=plan,
        receipts=receipts,
        model=model,
        started_at=started_at.isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
    )
    finish_output(output, report=report.model_dump_json(indent=2))
    return report


def _run_stages(
    spec: JobSpec, plan: JobPlan, *, open_backend: OpenBackend, model: ModelInfo, board: Any
) -> Iterator[Receipt]:
    """Execute the pipeline and yield the receipts of written chunks.

    Raises:
        JobFailedError: A stage failed for another reason than a row.
    """
    if not plan.units:
        return
    # Its plans and timings would stand between the lines of our progress.
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with DataContext.current(_data_context()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The maximum number of concurrent tasks")
        dataset = _build_pipeline(spec, plan, open_backend=open_backend, model=model, board=board)
        try:
            blocks: Iterable[Any] = dataset.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=0
            )
            for block in blocks:
                for line in block.column("receipt").to_pylist():
                    yield Receipt(**json.loads(line))
        except RayError as error:
            raise JobFailedError(
                f"The job stopped early and its output is not complete. Cause: {_cause(error)}"
            ) from error


def _cause(error: RayError) -> str:
    """Find the line that counts in what Ray wraps around an error of a worker."""
    lines = _ERROR_LINE.findall(str(error))
    return (lines[-1] if lines else f"{type(error).__name__}: {error}")[:_MESSAGE_CHARS]


def _build_pipeline(
    spec: JobSpec, plan: JobPlan, *, open_backend: OpenBackend, model: ModelInfo, board: Any
) -> Dataset:
    # Unlike `from_arrow`, this starts no tasks of its own, which would wait for a free processor.
    units = ray.data.from_blocks([_unit_table(unit) for unit in plan.units])
    chunks = units.map_batches(
        partial(_read_units, reader=ChunkReader.of(spec, plan)),
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=0,
        compute=TaskPoolStrategy(size=_NUM_READERS),
    )
    receipts: Dataset = chunks.map_batches(
        _AnswerAndWrite,
        fn_constructor_kwargs={
            "open_backend": open_backend,
            "task": RowTask.of(spec, plan),
            "model": model,
            "output": str(spec.output_path),
            "concurrency": spec.concurrency,
            "board": board,
        },
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=0,
        compute=ActorPoolStrategy(
            size=_NUM_ACTORS,
            max_concurrent_calls_per_actor=_NUM_ACTOR_CALLS,
            enable_true_multi_threading=True,
        ),
    )
    return receipts


def _data_context() -> DataContext:
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.max_errored_blocks = 0
    # A block per chunk, so that a task that is repeated repeats one chunk.
    context.target_max_block_size = 1
    # A row may rightly take longer than any limit here; rows have deadlines of their own.
    context.execution_no_progress_timeout_s = -1
    context.actor_init_retry_on_errors = True
    context.max_consecutive_actor_init_deaths = 3
    return context


def _unit_table(unit: ReadUnit) -> pa.Table:
    ranges = [asdict(each) for each in unit.ranges]
    return pa.table({"unit": pa.array([unit.index], pa.int64()), "ranges": [ranges]})


def _read_units(units: Any, *, reader: ChunkReader) -> Iterator[pa.Table]:
    for row in units.to_pylist():
        ranges = tuple(RowRange(**each) for each in row["ranges"])
        for chunk in reader.read(ReadUnit(index=row["unit"], ranges=ranges)):
            message = chunk.to_ipc()
            offsets = pa.array([0, message.size], pa.int64()).buffers()[1]
            packed = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, message])
            yield pa.Table.from_arrays([pa.array([chunk.name]), packed], schema=_CHUNK_SCHEMA)


class _AnswerAndWrite:
    """The stage that owns the connection to the service."""

    def __init__(
        self,
        *,
        open_backend: OpenBackend,
        task: RowTask,
        model: ModelInfo,
        output: str,
        concurrency: int,
        board: Any,
    ) -> None:
        # Workers of a service of this process write to its terminal, between our progress.
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._worker = ChunkWorker(
            open_backend,
            task=task,
            model=model,
            output=Path(output),
            concurrency=concurrency,
            on_advance=board.add.remote,
        )

    def __call__(self, chunks: pa.Table) -> Iterator[pa.Table]:
        """Answer and write each chunk of a block; a receipt comes out for each."""
        for name, packed in zip(chunks.column("name"), chunks.column("chunk"), strict=True):
            receipt = self._worker.run(Chunk.from_ipc(name.as_py(), packed.as_buffer()))
            line = json.dumps(receipt.to_values())
            yield pa.Table.from_arrays([pa.array([line])], schema=_RECEIPT_SCHEMA)


class _Board:
    """Where workers tell how far they are; a repeated task may count twice, so display only."""

    def __init__(self) -> None:
        self._sum = Advance()

    def add(self, advance: Advance) -> None:
        self._sum += advance

    def read(self) -> Advance:
        return self._sum


@contextmanager
def _watched(board: Any, on_progress: Callable[[Advance], None] | None) -> Iterator[None]:
    """Pass on what the board says until the block ends."""
    if on_progress is None:
        yield
        return
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_LOOK_EVERY_S):
            try:
                on_progress(ray.get(board.read.remote()))
            except RayError:
                # The cluster is gone; the job itself says so.
                return

    thread = threading.Thread(target=watch, name="orthros-batch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    on_progress(ray.get(board.read.remote()))
