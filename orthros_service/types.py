"""What the layers say to one another about one request, and the backend's protocol."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "cancelled", "error"]
PrefillModeChoice = Literal["auto", "full", "linear"]
Role = Literal["system", "user", "assistant"]
PrefillMode = Literal["full", "linear"]
"""How document tokens attended to one another: full softmax, or the linear prefill mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation; the content is data and never becomes control tokens."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How the next token is chosen.

    Args:
        max_tokens: Most tokens to generate, >= 1.
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k most likely tokens; None keeps all.
        seed: Makes sampling repeatable; None draws one.
        stop: Texts that end the answer; they are not part of it.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentText:
    """A text to ingest.

    Args:
        content_key: SHA-256 hex of the normalized text and the forced mode: equal content shares
            one state.
        text: The normalized text itself.
        mode: "auto" lets the length decide; the others force it.
        document_id: The catalogue's id whose progress is recorded; None for inline text.
    """

    content_key: str
    text: str
    mode: PrefillModeChoice = "auto"
    document_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedDocument:
    """A document's tokens, header included, with the code points that each covers.

    Args:
        content_key: Names the content; equal keys share one state.
        token_ids: [n] int32.
        char_starts: [n] int64.
        char_ends: [n] int64.
        mode: The prefill mode that was chosen for it.
    """

    content_key: str
    token_ids: npt.NDArray[np.int32]
    char_starts: npt.NDArray[np.int64]
    char_ends: npt.NDArray[np.int64]
    mode: PrefillMode


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One question or instruction over zero or more ingested documents.

    Args:
        request_id: Names the request in logs and for `cancel`.
        documents: The documents that form the context, in order; empty for plain chat.
        messages: The turns of the tail; the last one is the user's. With documents, the first user
            turn is the one
            that the document opens, so a system message here is added to that turn as the caller's
            instructions.
        sampling: How tokens are chosen.
        wants_citations: Whether to run the evidence pass.
        deadline_s: Seconds from now until the request ends with `deadline_exceeded`.
        is_streamed: Whether text goes to the caller as it comes. Where it does not, an answer may
            be begun anew after a worker died, though some of its text was there.
    """

    request_id: str
    documents: tuple[DocumentText, ...]
    messages: tuple[Message, ...]
    sampling: SamplingParameters
    wants_citations: bool = False
    deadline_s: float = 600.0
    is_streamed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Some more text of the answer; a UTF-8 character is never split."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceSpan:
    """A passage of a document that the answer's tokens attended to most.

    Offsets are code points: start/end in the stored text, answer_start/answer_end in the answer.
    """

    document_index: int
    start_char: int
    end_char: int
    answer_start: int
    answer_end: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds spent in each phase of one request."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFinished:
    """The last event of every successful generation.

    `is_linear` says whether a document of the context was prefilled in linear mode.
    """

    text: str
    finish_reason: FinishReason
    document_tokens: int
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int
    is_linear: bool = False
    evidence: tuple[EvidenceSpan, ...] = ()
    timings: Timings = field(default_factory=Timings)


GenerationEvent = TokenDelta | GenerationFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestProgress:
    """How far a document's prefill has come."""

    status: Literal["queued", "ingesting", "ready", "failed"]
    mode: Literal["full", "linear"] | None
    num_tokens: int | None
    tokens_done: int
    tokens_per_s: float | None
    error_code: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the API says about the model that it serves."""

    name: str
    is_converted: bool
    trained_context_tokens: int
    full_prefill_max_tokens: int
    max_context_tokens: int
    num_parameters: int
    window: int
    dtype: str
    digest: str


class GenerationBackend(Protocol):
    """What the gateway and batch jobs need of the workers; in process or over a cluster.

    Every method raises `OrthrosError` subclasses only.
    """

    async def ingest(self, document: DocumentText) -> None:
        """Start or join an ingestion and return at once; the catalogue records its progress."""
        ...

    async def forget(self, content_key: str) -> None:
        """Drop the state of this content from every tier."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Answer; closing the iterator cancels the work within one step."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored."""
        ...

    async def model_info(self) -> ModelInfo:
        """The served model."""
        ...

    async def is_ready(self) -> bool:
        """Whether at least one prefill and one decode worker answer."""
        ...
