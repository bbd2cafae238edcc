"""Segments in Ray's object store: written once, read by every process of a node without a copy."""

import asyncio
from collections.abc import Sequence

import ray

from orthros_deployments.remote_errors import orthros_errors
from orthros_service.errors import StateError
from orthros_service.state.types import Segment, SegmentRef

_GET_TIMEOUT_S = 60.0


class RayTransport:
    """A `SegmentTransport` whose references are object references.

    A segment lives as long as the process that owns its reference: the one that called `put`, or
    the caller of the remote method that returned it.
    """

    async def put(self, segment: Segment) -> SegmentRef:
        """Store a segment, owned by this process.

        Raises:
            OverloadedError: The object store is full.
        """
        with orthros_errors("handoff"):
            return await asyncio.to_thread(ray.put, segment)

    async def get_many(self, refs: Sequence[SegmentRef]) -> list[Segment]:
        """Resolve references in order; the arrays are read-only views of shared memory.

        Raises:
            StateError: A segment is gone, or the reference is of another transport.
            UnavailableError: Its owner died, or it did not come within a minute.
        """
        for ref in refs:
            if not isinstance(ref, ray.ObjectRef):
                raise StateError(
                    f"A segment reference of type {type(ref).__name__} is none of this cluster's.",
                    phase="handoff",
                )
        if not refs:
            return []
        with orthros_errors("handoff"):
            # In a thread: on the event loop, `ray.get` would hold up every other request.
            return await asyncio.to_thread(_get, refs)


def _get(refs: Sequence[SegmentRef]) -> list[Segment]:
    object_refs = [ref for ref in refs if isinstance(ref, ray.ObjectRef)]
    segments: list[Segment] = ray.get(object_refs, timeout=_GET_TIMEOUT_S)
    return segments
