"""A tokenizer of one token per character, a worker that computes checkable segments, a recorder."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orthros_service.engine.types import PrefillStep
from orthros_service.ingest import Ingestor, prefiller
from orthros_service.settings import PrefillSettings, StateSettings
from orthros_service.state.store import StateStore
from orthros_service.state.transport import LocalTransport
from orthros_service.state.types import Segment, StateHandle, StateLayout
from orthros_service.types import (
    DocumentText,
    IngestProgress,
    PrefillMode,
    PrefillModeChoice,
    TokenizedDocument,
)

HEADER = [1, 2]
SEGMENT_TOKENS = 4


class CharacterFormat:
    """One token per character behind a header of two."""

    def __init__(self) -> None:
        self.num_calls = 0

    def tokenize_document(
        self, text: str, content_key: str, mode: PrefillMode
    ) -> TokenizedDocument:
        self.num_calls += 1
        starts = np.arange(len(text))
        return TokenizedDocument(
            content_key=content_key,
            token_ids=np.array(HEADER + [ord(c) for c in text], np.int32),
            char_starts=np.concatenate([[0, 0], starts]).astype(np.int64),
            char_ends=np.concatenate([[0, 0], starts + 1]).astype(np.int64),
            mode=mode,
        )


def expected_kv(
    step_tokens: np.ndarray, context: Sequence[Segment], mode: PrefillMode
) -> np.ndarray:
    """Keys that depend on the step's tokens, its whole context and the mode."""
    seen = sum(int(segment.kv.sum()) for segment in context) + len(context) + (mode == "full")
    values = step_tokens.astype(np.int64) * 31 + seen
    return (values % 20_011).astype(np.int16).reshape(1, 1, 1, -1, 1).repeat(2, axis=1)


class FakeWorker:
    """Computes segments at once; hooks make it slow or make it fail."""

    def __init__(self) -> None:
        self.steps: list[PrefillStep] = []
        self.num_running = 0
        self.most_running = 0
        self.num_cancelled = 0
        self.before_step: Callable[[PrefillStep], object] = lambda step: None
        self.gate: asyncio.Semaphore | None = None
        self.hang_once_at: set[int] = set()
        self.step_s = 0.0
        self.is_answering = True

    async def step(self, step: PrefillStep, context: Sequence[Segment]) -> Segment:
        self.steps.append(step)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.step_s)
            if step.start in self.hang_once_at:
                self.hang_once_at.remove(step.start)
                await asyncio.sleep(60)
            if self.gate is not None:
                await self.gate.acquire()
            self.before_step(step)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        if step.start:
            assert context[0].start == 0
            assert context[-1].end == step.start
        return Segment(
            start=step.start,
            token_ids=step.token_ids,
            char_starts=step.char_starts,
            char_ends=step.char_ends,
            kv=expected_kv(step.token_ids, context, step.layout.mode),
        )

    async def is_ready(self) -> bool:
        return self.is_answering


class FakeRecorder:
    def __init__(self) -> None:
        self.records: list[tuple[str, IngestProgress]] = []
        self.error: Exception | None = None

    def record(self, content_key: str, progress: IngestProgress) -> None:
        if self.error is not None:
            raise self.error
        self.records.append((content_key, progress))

    def of(self, content_key: str) -> list[IngestProgress]:
        return [progress for key, progress in self.records if key == content_key]


class World:
    """Everything around one ingestor; `restart` keeps only the disk."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.layout = StateLayout(
            model_digest="model",
            tokenizer_digest="tokenizer",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            dtype="bfloat16",
            window=4,
            num_sinks=1,
            mode="full",
            segment_tokens=SEGMENT_TOKENS,
        )
        self.ingestors: list[Ingestor] = []
        self.restart()

    def restart(self, *, full_prefill_max_tokens: int = 6, num_workers: int = 1) -> None:
        self.format = CharacterFormat()
        self.worker = FakeWorker()
        self.recorder = FakeRecorder()
        self.store = StateStore(
            settings=StateSettings(uri=self.uri), transport=LocalTransport(), header_ids=HEADER
        )
        self.ingestor = Ingestor(
            prompt_format=self.format,
            worker=self.worker,
            store=self.store,
            transport=LocalTransport(),
            layout=self.layout,
            full_prefill_max_tokens=full_prefill_max_tokens,
            max_context_tokens=200,
            max_document_tokens=100,
            settings=PrefillSettings(
                segment_tokens=SEGMENT_TOKENS, step_timeout_s=0.2, num_retries=2
            ),
            recorder=self.recorder,
            num_workers=num_workers,
        )
        self.ingestors.append(self.ingestor)

    def files(self, pattern: str = "*.arrow") -> list[Path]:
        """What is on disk."""
        return sorted(Path(self.uri).rglob(pattern))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let the tasks run until something holds."""
        async with asyncio.timeout(5):
            while not holds():  # noqa: ASYNC110 - there is no event for an arbitrary condition
                await asyncio.sleep(0.001)

    async def until_steps(self, number: int) -> None:
        """Let the tasks run until so many steps were begun."""
        await self.until(lambda: len(self.worker.steps) >= number)

    @staticmethod
    def document(
        text: str, *, mode: PrefillModeChoice = "auto", document_id: str | None = "doc-1"
    ) -> DocumentText:
        key = hashlib.sha256(f"{mode}:{text}".encode()).hexdigest()
        return DocumentText(content_key=key, text=text, mode=mode, document_id=document_id)

    @staticmethod
    async def settle() -> None:
        """Let everything that can happen by itself happen."""
        for _ in range(20):
            await asyncio.sleep(0.001)

    def check(self, handle: StateHandle, text: str, mode: PrefillMode) -> None:
        """Compare a state with the reference."""
        assert handle.layout == replace(self.layout, mode=mode)
        assert handle.num_tokens == len(text) + len(HEADER)
        keys = [segment.kv for segment in handle.segments]
        assert handle.num_bytes == sum(kv.nbytes for kv in keys)
        expected = self.reference(text, mode)
        assert len(expected) == len(keys)
        for left, right in zip(keys, expected, strict=True):
            assert np.array_equal(left, right)

    def reference(self, text: str, mode: PrefillMode) -> list[np.ndarray]:
        """The keys of every segment, computed in one go."""
        ids = np.array(HEADER + [ord(c) for c in text], np.int32)
        layout = replace(self.layout, mode=mode)
        segments: list[Segment] = []
        for start in range(0, len(ids), SEGMENT_TOKENS):
            part = ids[start : start + SEGMENT_TOKENS]
            context = segments if mode == "full" else [*segments[:1], *segments[1:][-1:]]
            segments.append(
                Segment(
                    start=start,
                    token_ids=part,
                    char_starts=part.astype(np.int64),
                    char_ends=part.astype(np.int64),
                    kv=expected_kv(part, context, layout.mode),
                )
            )
        return [segment.kv for segment in segments]


@pytest.fixture
async def world(tmp_path, monkeypatch):
    monkeypatch.setattr(prefiller, "RETRY_DELAY_S", 0.001)
    world = World(str(tmp_path / "states"))
    yield world
    for ingestor in world.ingestors:
        await ingestor.close()
