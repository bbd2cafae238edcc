import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from orthros_service.engine.local import LocalPrefillWorker
from orthros_service.engine.types import PrefillStep
from orthros_service.errors import CancelledError, StateError
from orthros_service.state.types import Segment


class PollingEngine:
    """Takes a step at once, or runs until it is told to stop."""

    def __init__(self) -> None:
        self.is_endless = False
        self.started = threading.Event()
        self.stopped = threading.Event()
        self.contexts: list[Sequence[Segment]] = []
        self.error: Exception | None = None

    def step(
        self, step: PrefillStep, context: Sequence[Segment], *, is_cancelled: Callable[[], bool]
    ) -> Segment:
        self.contexts.append(context)
        self.started.set()
        if self.error is not None:
            raise self.error
        while self.is_endless:
            if is_cancelled():
                self.stopped.set()
                raise CancelledError("stopped", phase="prefill")
            self.stopped.wait(0.001)
        return Segment(
            start=step.start,
            token_ids=step.token_ids,
            char_starts=step.char_starts,
            char_ends=step.char_ends,
            kv=np.zeros((1, 2, 1, len(step.token_ids), 1), np.int16),
        )


@pytest.fixture
def engine():
    return PollingEngine()


@pytest.fixture
def worker(engine):
    with ThreadPoolExecutor(1) as executor:
        yield LocalPrefillWorker(engine, executor)
        engine.is_endless = False


@pytest.fixture
def step(layout):
    ids = np.arange(4)
    return PrefillStep(
        layout=layout, start=0, token_ids=ids.astype(np.int32), char_starts=ids, char_ends=ids
    )


async def test_a_step_runs_off_the_loop_and_its_reference_is_the_segment(worker, engine, step):
    first = await worker.step(step, [])
    second = await worker.step(step, [first])

    assert isinstance(second, Segment)
    assert engine.contexts[1][0] is first
    assert await worker.is_ready()


async def test_a_cancelled_step_stops_the_engine_and_frees_the_thread(worker, engine, step):
    engine.is_endless = True
    task = asyncio.create_task(worker.step(step, []))
    await asyncio.to_thread(engine.started.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await asyncio.to_thread(engine.stopped.wait, 5)
    engine.is_endless = False
    async with asyncio.timeout(5):
        await worker.step(step, [])


async def test_a_cancelled_step_that_had_not_begun_never_runs(worker, engine, step):
    engine.is_endless = True
    first = asyncio.create_task(worker.step(step, []))
    await asyncio.to_thread(engine.started.wait, 5)
    second = asyncio.create_task(worker.step(step, []))
    await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    engine.is_endless = False
    await first

    assert len(engine.contexts) == 1


async def test_an_engines_error_reaches_the_caller(worker, engine, step):
    engine.error = StateError("wrong context")
    with pytest.raises(StateError, match="wrong context"):
        await worker.step(step, [])


async def test_a_reference_of_another_transport_is_refused(worker, engine, step):
    with pytest.raises(StateError):
        await worker.step(step, [object()])
    assert not engine.contexts
