"""Engines that spell a text one character per step, under the test's control."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from orthros_service.engine.local import LocalDecodeWorker
from orthros_service.engine.types import DecodeDelta, DecodeFinished, DecodeOutput, DecodeWork
from orthros_service.errors import OrthrosError
from orthros_service.settings import DecodeSettings
from orthros_service.state.transport import LocalTransport
from orthros_service.state.types import AttentionState, Segment, StateHandle, StateLayout
from orthros_service.types import SamplingParameters


class SpellingEngine:
    """Each sequence spells "a", "b", ... up to its max_tokens; one step, one character.

    A step waits for a permit when `permits` is set, so that a test can stand between two steps.
    """

    def __init__(self) -> None:
        self.sequences: dict[str, int] = {}
        self.works: dict[str, DecodeWork] = {}
        self.states: dict[str, Sequence[AttentionState]] = {}
        self.cancelled: list[str] = []
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()
        self.permits: threading.Semaphore | None = None
        self.fail_step: Exception | None = None
        self.fail_add: dict[str, Exception] = {}
        self.fail_sequence: dict[str, OrthrosError] = {}
        self.is_losing = False
        self.letter: Callable[[int], str] = lambda index: chr(ord("a") + index % 26)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def add(self, work: DecodeWork, states: Sequence[AttentionState]) -> None:
        self.threads.add(threading.get_ident())
        if work.request_id in self.fail_add:
            raise self.fail_add[work.request_id]
        assert work.request_id not in self.sequences
        self.sequences[work.request_id] = 0
        self.works[work.request_id] = work
        self.states[work.request_id] = states

    def cancel(self, request_id: str) -> bool:
        self.threads.add(threading.get_ident())
        self.cancelled.append(request_id)
        return self.sequences.pop(request_id, None) is not None

    def step(self) -> list[tuple[str, DecodeOutput | OrthrosError]]:
        self.threads.add(threading.get_ident())
        self.batches.append(sorted(self.sequences))
        if self.permits is not None:
            assert self.permits.acquire(timeout=5)
        if self.fail_step is not None:
            error, self.fail_step = self.fail_step, None
            raise error
        results: list[tuple[str, DecodeOutput | OrthrosError]] = []
        for request_id, done in list(self.sequences.items()):
            if request_id in self.fail_sequence:
                del self.sequences[request_id]
                results.append((request_id, self.fail_sequence[request_id]))
                continue
            results.append((request_id, DecodeDelta(text=self.letter(done), num_tokens=1)))
            self.sequences[request_id] = done + 1
            if done + 1 == self.works[request_id].sampling.max_tokens:
                del self.sequences[request_id]
                text = "".join(self.letter(index) for index in range(done + 1))
                finished = DecodeFinished(
                    text=text,
                    finish_reason="length",
                    completion_tokens=done + 1,
                    first_token_s=0.25,
                    decode_s=0.5,
                )
                results.append((request_id, finished))
        if self.is_losing:
            self.sequences.clear()
            return []
        return results


class SlowTransport:
    """Holds every hand-off until its gate opens, or fails it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.gate = asyncio.Event()

    async def put(self, segment):
        return segment

    async def get_many(self, refs):
        if self.error is not None:
            raise self.error
        await self.gate.wait()
        return list(refs)


@pytest.fixture
def layout() -> StateLayout:
    return StateLayout(
        model_digest="model",
        tokenizer_digest="tokenizer",
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        dtype="bfloat16",
        window=4,
        num_sinks=1,
        mode="full",
        segment_tokens=4,
    )


@pytest.fixture
def make_handle(layout):
    def make(num_tokens: int, *, layout: StateLayout = layout, key: str = "ab") -> StateHandle:
        segments = []
        for start in range(0, num_tokens, 4):
            size = min(4, num_tokens - start)
            positions = np.arange(start, start + size)
            segments.append(
                Segment(
                    start=start,
                    token_ids=positions.astype(np.int32),
                    char_starts=positions,
                    char_ends=positions,
                    kv=np.zeros((1, 2, 1, size, 1), np.int16),
                )
            )
        return StateHandle(
            content_key=key * 32,
            layout=layout,
            segments=tuple(segments),
            num_tokens=num_tokens,
            num_bytes=4 * num_tokens,
        )

    return make


@pytest.fixture
def engine() -> SpellingEngine:
    return SpellingEngine()


@pytest.fixture
async def make_worker(engine, layout):
    workers = []

    def make(*, transport=None, max_sequences=4, stream_interval_s=0.0) -> LocalDecodeWorker:
        settings = DecodeSettings(max_sequences=max_sequences, stream_interval_s=stream_interval_s)
        worker = LocalDecodeWorker(
            engine, transport=transport or LocalTransport(), layout=layout, settings=settings
        )
        workers.append(worker)
        return worker

    yield make
    if engine.permits is not None:
        engine.permits.release(10_000)
    for worker in workers:
        await worker.close()


@pytest.fixture
def make_work():
    def make(request_id="r1", *, max_tokens=5, documents=(), deadline_s=5.0) -> DecodeWork:
        return DecodeWork(
            request_id=request_id,
            documents=tuple(documents),
            tail_ids=(1, 2, 3),
            sampling=SamplingParameters(max_tokens=max_tokens),
            stop_ids=frozenset(),
            deadline_s=deadline_s,
        )

    return make


async def _collect(worker: LocalDecodeWorker, work: DecodeWork) -> list[DecodeOutput]:
    return [output async for output in worker.generate(work)]


@pytest.fixture
def collect():
    return _collect


@pytest.fixture
def until():
    async def wait(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not holds():  # noqa: ASYNC110 - there is no event for an arbitrary condition
                await asyncio.sleep(0.001)

    return wait


@pytest.fixture
def slow_transport() -> SlowTransport:
    return SlowTransport()
