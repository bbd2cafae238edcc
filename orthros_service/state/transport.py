"""How segments move between the processes that make, keep and read them."""

from collections.abc import Sequence
from typing import Protocol

from orthros_service.errors import StateError
from orthros_service.state.types import Segment, SegmentRef


class SegmentTransport(Protocol):
    """Turns segments into references that are cheap to send, and back."""

    async def put(self, segment: Segment) -> SegmentRef:
        """Store a segment; it lives as long as somebody holds the reference."""
        ...

    async def get_many(self, refs: Sequence[SegmentRef]) -> list[Segment]:
        """Resolve references, in order; the arrays are read-only views where the medium allows it.

        Raises:
            StateError: A referenced segment is gone; prefill the document again.
        """
        ...


class LocalTransport:
    """One process: a reference is the segment itself."""

    async def put(self, segment: Segment) -> SegmentRef:
        """Return the segment as its own reference."""
        return segment

    async def get_many(self, refs: Sequence[SegmentRef]) -> list[Segment]:
        """Return the segments.

        Raises:
            StateError: A reference was made by another transport.
        """
        segments: list[Segment] = []
        for ref in refs:
            if not isinstance(ref, Segment):
                raise StateError(
                    f"A segment reference of type {type(ref).__name__} cannot be read in process."
                )
            segments.append(ref)
        return segments
