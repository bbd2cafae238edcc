"""Answer and write chunks for a caller that is not asynchronous, keeping the backend busy."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from orthros_service.jobs.output import Receipt, write_chunk
from orthros_service.jobs.reading import Chunk
from orthros_service.jobs.row_types import RowResult, RowTask
from orthros_service.jobs.rows import RowAnswerer
from orthros_service.types import GenerationBackend, ModelInfo

_Result = TypeVar("_Result")

_TELL_EVERY_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What was done since the last time the worker told; for display, not for the report."""

    num_rows: int = 0
    num_failed: int = 0
    num_tokens: int = 0

    def __add__(self, other: "Advance") -> "Advance":
        return Advance(
            num_rows=self.num_rows + other.num_rows,
            num_failed=self.num_failed + other.num_failed,
            num_tokens=self.num_tokens + other.num_tokens,
        )


class ChunkWorker:
    """Runs an event loop in a thread of its own; `run` may be called from several threads.

    Args:
        open_backend: Called once, inside the loop.
        task: What is asked of every row.
        model: The served model; named in every row.
        output: Folder that `prepare_output` has made.
        concurrency: Rows in flight at once, over all callers.
        on_advance: Told every moment how many rows were done since; must not wait.
    """

    def __init__(
        self,
        open_backend: Callable[[], GenerationBackend],
        *,
        task: RowTask,
        model: ModelInfo,
        output: Path,
        concurrency: int,
        on_advance: Callable[[Advance], None],
    ) -> None:
        self._model = model
        self._output = output
        self._advances = _Advances(on_advance)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="orthros-batch", daemon=True
        )
        self._thread.start()

        async def start() -> RowAnswerer:
            return RowAnswerer(open_backend(), task=task, concurrency=concurrency)

        self._answerer = self._submit(start()).result()

    def run(self, chunk: Chunk) -> Receipt:
        """Answer a chunk and write it as soon as its last row is done.

        Call it for the next chunk, from another thread, before this one is done: while the last
        rows of one are in flight, rows of the other fill the free slots.
        """
        answering = self._answerer.answer_chunk(chunk, on_row=self._advances.add)
        results = self._submit(answering).result()
        self._advances.tell()
        return write_chunk(self._output, chunk, results=results, model=self._model)

    def close(self) -> None:
        """Stop the loop; no call of `run` may be going on."""
        self._submit(self._loop.shutdown_asyncgens()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


class _Advances:
    """Collects finished rows and passes them on now and then."""

    def __init__(self, on_advance: Callable[[Advance], None]) -> None:
        self._on_advance = on_advance
        self._lock = threading.Lock()
        self._untold = Advance()
        self._told_at = time.monotonic()

    def add(self, result: RowResult) -> None:
        num_tokens = sum(
            count or 0
            for count in (result.document_tokens, result.prompt_tokens, result.completion_tokens)
        )
        one = Advance(num_rows=1, num_failed=int(result.status == "error"), num_tokens=num_tokens)
        with self._lock:
            self._untold += one
        if time.monotonic() - self._told_at > _TELL_EVERY_S:
            self.tell()

    def tell(self) -> None:
        with self._lock:
            untold, self._untold = self._untold, Advance()
            self._told_at = time.monotonic()
        if untold.num_rows:
            self._on_advance(untold)
