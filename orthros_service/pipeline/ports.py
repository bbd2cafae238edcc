"""What a request needs of the world around it: local objects in process, handles on a cluster."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from orthros_service.engine.types import DecodeOutput, DecodeWork, DocumentEvidence
from orthros_service.state.types import StateHandle
from orthros_service.types import DocumentText, EvidenceSpan, Message, TokenizedDocument


class CoordinatorPort(Protocol):
    """Ingests documents and hands out their states."""

    async def start(self, document: DocumentText) -> None:
        """Start ingesting a document, or join the running job; returns at once."""
        ...

    async def wait_ready(
        self, source: DocumentText | TokenizedDocument, *, timeout_s: float
    ) -> StateHandle:
        """Ingest if need be and wait for the state; cancelling the wait leaves the job.

        Raises:
            DeadlineExceededError: Not ready within timeout_s.
            OrthrosError: The ingestion failed.
        """
        ...

    async def forget(self, content_key: str) -> None:
        """Stop a running ingestion and delete the state from every tier."""
        ...

    async def is_ready(self) -> bool:
        """Whether work is accepted and a prefill worker answers."""
        ...


class DecodeWorker(Protocol):
    """Decodes sequences and streams their outputs."""

    def generate(self, work: DecodeWork) -> AsyncIterator[DecodeOutput]:
        """Stream one sequence; the last output is a `DecodeFinished`.

        Raises:
            UnavailableError: No worker answers, or the one that had it died.
            OrthrosError: The sequence failed.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Free a sequence within one step; unknown ids are ignored."""
        ...

    async def is_ready(self) -> bool:
        """Whether a worker answers."""
        ...


class TailFormat(Protocol):
    """The prompt format, as far as it concerns the tail."""

    def document_tail(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Everything behind the documents."""
        ...

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The whole prompt of a conversation without documents."""
        ...

    def last_user_turn_start(self, messages: Sequence[Message]) -> int:
        """Index in `chat(messages)` of the token that opens the last user turn."""
        ...


class EvidenceSelector(Protocol):
    """Turns attention mass into passages."""

    def __call__(
        self, texts: Sequence[str], evidence: Sequence[DocumentEvidence], answer: str
    ) -> tuple[EvidenceSpan, ...]:
        """Pick the passages that the answer rests on."""
        ...
