"""Drives the decode engine: one turn after another in a thread, as long as there is work."""

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from orthros_service.engine.outlet import Outlet
from orthros_service.engine.types import DecodeDelta, DecodeFinished, DecodeOutput, DecodeWork
from orthros_service.errors import EngineError, OrthrosError
from orthros_service.state.types import AttentionState

logger = logging.getLogger(__name__)

StepResult = tuple[str, DecodeOutput | OrthrosError]


class DecodeStepper(Protocol):
    """The decode engine, as the worker sees it; called from one thread only."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def add(self, work: DecodeWork, states: Sequence[AttentionState]) -> None:
        """Take a sequence into the batch."""
        ...

    def cancel(self, request_id: str) -> object:
        """Drop a sequence and its memory; unknown ids are ignored."""
        ...

    def step(self) -> list[StepResult]:
        """One token for every sequence; a failed sequence comes back as its error."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class PendingSequence:
    """A request on its way through the worker; `phase` says how far it is.

    `confirmed_at` is the last time that its caller was known to be there.
    """

    work: DecodeWork
    outlet: Outlet = field(default_factory=Outlet)
    states: tuple[AttentionState, ...] = ()
    received_at: float = field(default_factory=time.perf_counter)
    confirmed_at: float = field(default_factory=time.perf_counter)
    handoff_s: float = 0.0
    queue_s: float = 0.0
    phase: str = "handoff"


class BatchDriver:
    """Lets sequences join and leave the engine's batch between two steps.

    Belongs to one event loop; the engine is called from one thread of the driver's own.

    Args:
        engine: Does the work.
        max_sequences: Most sequences in the batch; more wait, first come first served.
    """

    def __init__(self, engine: DecodeStepper, *, max_sequences: int) -> None:
        self._engine = engine
        self._max_sequences = max_sequences
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="orthros-decode")
        self._waiting: deque[PendingSequence] = deque()
        self._active: dict[str, PendingSequence] = {}
        self._to_cancel: list[str] = []
        self._task: asyncio.Task[None] | None = None

    def submit(self, sequence: PendingSequence) -> None:
        """Queue a sequence for the batch."""
        sequence.phase = "queue"
        self._waiting.append(sequence)
        if self._task is None or self._task.done():
            # An empty context: the task works for every request, not for the one that woke it.
            self._task = asyncio.create_task(self._drive(), context=contextvars.Context())

    def drop(self, sequence: PendingSequence) -> None:
        """Take a sequence out of the queue, or out of the batch before its next step."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif self._active.get(sequence.work.request_id) is sequence:
            del self._active[sequence.work.request_id]
            self._to_cancel.append(sequence.work.request_id)

    async def close(self) -> None:
        """Wait for the work that is left, which is none once every sequence was dropped."""
        if self._task is not None:
            await self._task
        await asyncio.to_thread(self._executor.shutdown)

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting or self._active or self._to_cancel:
            admitted = self._admit()
            cancelled, self._to_cancel = self._to_cancel, []
            try:
                results = await loop.run_in_executor(
                    self._executor, self._turn, admitted, cancelled
                )
            except Exception as error:
                # The engine's edge: every request of the batch gets an answer, later ones go on.
                logger.exception("decode step failed with %d sequences", len(self._active))
                self._fail_active(_as_orthros_error(error))
                continue
            for request_id, output in results:
                self._deliver(request_id, output)
            if self._active and not self._engine.has_work:
                self._fail_active(EngineError("The engine lost the sequence.", phase="decode"))

    def _admit(self) -> list[PendingSequence]:
        admitted = []
        while self._waiting and len(self._active) < self._max_sequences:
            sequence = self._waiting.popleft()
            sequence.phase = "decode"
            sequence.queue_s = time.perf_counter() - sequence.received_at - sequence.handoff_s
            self._active[sequence.work.request_id] = sequence
            admitted.append(sequence)
        return admitted

    def _turn(
        self, admitted: Sequence[PendingSequence], cancelled: Sequence[str]
    ) -> list[StepResult]:
        """Everything between two steps and the step itself, in the engine's thread."""
        for request_id in cancelled:
            self._engine.cancel(request_id)
        results: list[StepResult] = []
        for sequence in admitted:
            request_id = sequence.work.request_id
            try:
                self._engine.add(sequence.work, sequence.states)
            except Exception as error:
                logger.warning("request %s was not taken into the batch", request_id, exc_info=True)
                self._engine.cancel(request_id)
                results.append((request_id, _as_orthros_error(error)))
        if self._engine.has_work:
            results += self._engine.step()
        return results

    def _deliver(self, request_id: str, output: DecodeOutput | OrthrosError) -> None:
        sequence = self._active.get(request_id)
        if sequence is None:
            return
        if isinstance(output, DecodeDelta):
            sequence.outlet.put(output)
            return
        if isinstance(output, DecodeFinished):
            output = replace(output, queue_s=sequence.queue_s, handoff_s=sequence.handoff_s)
        del self._active[request_id]
        sequence.outlet.end(output)

    def _fail_active(self, error: OrthrosError) -> None:
        for request_id, sequence in self._active.items():
            sequence.outlet.end(error)
            self._to_cancel.append(request_id)
        self._active.clear()


def _as_orthros_error(error: Exception) -> OrthrosError:
    if isinstance(error, OrthrosError):
        return error
    wrapped = EngineError(f"Decoding failed: {type(error).__name__}.", phase="decode")
    wrapped.__cause__ = error
    return wrapped
