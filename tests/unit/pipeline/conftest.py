"""A coordinator and a decode worker that do what the test says."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np
import pytest

from orthros_service.engine.types import (
    DecodeDelta,
    DecodeFinished,
    DecodeOutput,
    DecodeWork,
    DocumentEvidence,
)
from orthros_service.pipeline import Pipeline, PromptLimits, PromptPlanner
from orthros_service.state.types import StateHandle, StateLayout
from orthros_service.types import (
    DocumentText,
    EvidenceSpan,
    GenerationEvent,
    GenerationRequest,
    Message,
    ModelInfo,
    SamplingParameters,
    TokenizedDocument,
)

HEADER_TOKENS = 10
MODEL = ModelInfo(
    name="fake",
    is_converted=False,
    trained_context_tokens=1000,
    full_prefill_max_tokens=1000,
    max_context_tokens=4000,
    num_parameters=1,
    window=4,
    dtype="float32",
    digest="model",
)
LAYOUT = StateLayout(
    model_digest="model",
    tokenizer_digest="tokenizer",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    dtype="float32",
    window=4,
    num_sinks=1,
    mode="full",
    segment_tokens=4,
)


class LetterFormat:
    """One token per letter; every turn is opened by one token, the answer by another."""

    def document_tail(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.chat(messages)[1:]

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        turns = (token for message in messages for token in (1, *map(ord, message.content)))
        return (*turns, 2)

    def last_user_turn_start(self, messages: Sequence[Message]) -> int:
        return len(self.chat(messages[:-1])) - 1


class FakeCoordinator:
    """Makes a state of any source; a gate or an error per content key."""

    def __init__(self) -> None:
        self.sources: list[DocumentText | TokenizedDocument] = []
        self.timeouts: list[float] = []
        self.started: list[DocumentText] = []
        self.forgotten: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.errors: dict[str, Exception] = {}
        self.num_cancelled = 0
        self.is_answering = True

    async def start(self, document: DocumentText) -> None:
        self.started.append(document)

    async def wait_ready(
        self, source: DocumentText | TokenizedDocument, *, timeout_s: float
    ) -> StateHandle:
        self.sources.append(source)
        self.timeouts.append(timeout_s)
        if source.content_key in self.gates:
            try:
                await self.gates[source.content_key].wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        if source.content_key in self.errors:
            raise self.errors[source.content_key]
        is_text = isinstance(source, DocumentText)
        num_tokens = len(source.text) + HEADER_TOKENS if is_text else len(source.token_ids)
        return StateHandle(
            content_key=source.content_key,
            layout=LAYOUT,
            segments=(),
            num_tokens=num_tokens,
            num_bytes=0,
        )

    async def forget(self, content_key: str) -> None:
        self.forgotten.append(content_key)

    async def is_ready(self) -> bool:
        return self.is_answering


class FakeDecoder:
    """Answers "yes!" letter by letter; `script` may replace any attempt."""

    def __init__(self) -> None:
        self.works: list[DecodeWork] = []
        self.cancelled: list[str] = []
        self.num_closed = 0
        self.gate: asyncio.Event | None = None
        self.scripts: list[Callable[[DecodeWork], AsyncGenerator[DecodeOutput, None]]] = []
        self.evidence: tuple[DocumentEvidence, ...] = ()
        self.cancel_error: Exception | None = None
        self.is_answering = True

    async def generate(self, work: DecodeWork) -> AsyncGenerator[DecodeOutput, None]:
        self.works.append(work)
        script = self.scripts.pop(0) if self.scripts else self.answer
        try:
            async for output in script(work):
                yield output
        finally:
            self.num_closed += 1

    async def answer(self, work: DecodeWork) -> AsyncGenerator[DecodeOutput, None]:
        for index, letter in enumerate("yes!"):
            if index and self.gate is not None:
                await self.gate.wait()
            yield DecodeDelta(text=letter, num_tokens=1)
        yield DecodeFinished(
            text="yes!",
            finish_reason="stop",
            completion_tokens=4,
            evidence=self.evidence if work.wants_evidence else (),
            queue_s=0.1,
            handoff_s=0.2,
            first_token_s=0.3,
            decode_s=0.4,
        )

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        if self.cancel_error is not None:
            raise self.cancel_error

    async def is_ready(self) -> bool:
        return self.is_answering


class World:
    """A pipeline and its fakes."""

    def __init__(self) -> None:
        self.coordinator = FakeCoordinator()
        self.decoder = FakeDecoder()
        self.selections: list[tuple[list[str], int, str]] = []
        self.spans: tuple[EvidenceSpan, ...] = ()
        self.pipeline = self.build()

    def build(self, *, max_tail_tokens: int = 1500, max_chat_tokens: int = 4000) -> Pipeline:
        limits = PromptLimits(
            full_prefill_max_tokens=MODEL.full_prefill_max_tokens,
            max_context_tokens=MODEL.max_context_tokens,
            max_tail_tokens=max_tail_tokens,
            max_chat_tokens=max_chat_tokens,
            tile=128,
        )
        self.pipeline = Pipeline(
            coordinator=self.coordinator,
            decoder=self.decoder,
            planner=PromptPlanner(LetterFormat(), limits),
            select_evidence=self.select,
            model=MODEL,
            stop_ids=frozenset({7}),
        )
        return self.pipeline

    def select(
        self, texts: Sequence[str], evidence: Sequence[DocumentEvidence], answer: str
    ) -> tuple[EvidenceSpan, ...]:
        self.selections.append((list(texts), len(evidence), answer))
        return self.spans

    @staticmethod
    def document(text: str) -> DocumentText:
        return DocumentText(content_key=hashlib.sha256(text.encode()).hexdigest(), text=text)

    def request(
        self,
        *texts: str,
        messages: Sequence[Message] | None = None,
        question: str = "why?",
        max_tokens: int = 50,
        **changes,
    ) -> GenerationRequest:
        values = {
            "request_id": "r1",
            "documents": tuple(self.document(text) for text in texts),
            "messages": tuple(messages or [Message(role="user", content=question)]),
            "sampling": SamplingParameters(max_tokens=max_tokens),
            "deadline_s": 5.0,
        }
        return GenerationRequest(**(values | changes))

    async def collect(self, request: GenerationRequest) -> list:
        """All events; those before an error are in `events`."""
        self.events: list[GenerationEvent] = []
        async for event in self.pipeline.generate(request):
            self.events.append(event)
        return self.events

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not holds():  # noqa: ASYNC110 - there is no event for an arbitrary condition
                await asyncio.sleep(0.001)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def evidence() -> tuple[DocumentEvidence, ...]:
    offsets = np.arange(3)
    mass = np.ones(3, np.float32)
    return (DocumentEvidence(char_starts=offsets, char_ends=offsets + 1, mass=mass),)
