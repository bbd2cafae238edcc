"""What ingestion needs of the world around it."""

from collections.abc import Sequence
from typing import Protocol

from orthros_service.engine.types import PrefillStep
from orthros_service.state.types import SegmentRef
from orthros_service.types import DocumentText, IngestProgress, PrefillMode, TokenizedDocument

Source = DocumentText | TokenizedDocument
"""A text, or tokens that need no header: the prefix of a long chat."""


class PrefillWorker(Protocol):
    """Runs prefill steps: one worker in process, any replica on a cluster."""

    async def step(self, step: PrefillStep, context: Sequence[SegmentRef]) -> SegmentRef:
        """Compute one segment; cancelling the call stops the work soon after.

        Raises:
            OrthrosError: The step failed; retryable ones may be sent again.
        """
        ...

    async def is_ready(self) -> bool:
        """Whether at least one worker answers."""
        ...


class DocumentTokenizer(Protocol):
    """What ingestion needs of the prompt format."""

    def tokenize_document(
        self, text: str, content_key: str, mode: PrefillMode
    ) -> TokenizedDocument:
        """Header and document tokens with their character offsets."""
        ...


class ProgressRecorder(Protocol):
    """Where progress is kept for readers; called from one thread, in order."""

    def record(self, content_key: str, progress: IngestProgress) -> None:
        """Store the latest progress of a content; unknown contents are ignored."""
        ...
