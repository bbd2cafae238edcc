"""Where ready states live: memory first, Arrow files behind it.

States are a cache: each can be rebuilt from its text, so a disk that fails costs time, never a
document. Calls for one content key must not overlap; the ingestor sees to that.
"""

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orthros_service.errors import InvalidValueError
from orthros_service.settings import StateSettings
from orthros_service.state.disk import DiskTier
from orthros_service.state.transport import SegmentTransport
from orthros_service.state.types import Segment, SegmentRef, StateHandle, StateLayout

logger = logging.getLogger(__name__)

_CONTENT_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What each tier holds; a state can be in both."""

    memory_bytes: int
    memory_states: int
    disk_bytes: int
    disk_states: int


class MemoryTier:
    """Handles of ready states, least recently used out first.

    Evicting drops the tier's own references only: a handle that was given out stays valid.

    Args:
        max_bytes: Budget for keys and values. A larger state is never kept.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._handles: OrderedDict[str, StateHandle] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        """Number of states kept."""
        return len(self._handles)

    def get(self, content_key: str) -> StateHandle | None:
        """Return a state and mark it as just used."""
        handle = self._handles.get(content_key)
        if handle is not None:
            self._handles.move_to_end(content_key)
        return handle

    def put(self, handle: StateHandle) -> None:
        """Keep a state, evicting the ones unused for longest until the budget holds."""
        self.delete(handle.content_key)
        if handle.num_bytes > self._max_bytes:
            logger.warning(
                "state %s: %d bytes are over state.memory_bytes=%d, not kept in memory",
                handle.content_key[:12],
                handle.num_bytes,
                self._max_bytes,
            )
            return
        self._handles[handle.content_key] = handle
        self.num_bytes += handle.num_bytes
        while self.num_bytes > self._max_bytes:
            oldest = next(iter(self._handles))
            self.delete(oldest)

    def delete(self, content_key: str) -> None:
        """Forget a state; unknown keys are ignored."""
        handle = self._handles.pop(content_key, None)
        if handle is not None:
            self.num_bytes -= handle.num_bytes


class StateStore:
    """Keeps ready states in memory and, for durable documents, on disk.

    Args:
        settings: Where the files are and how much memory states may take.
        transport: Turns segments into the references that handles hold.
        header_ids: Token ids that every document begins with; files made with others are not found.
    """

    def __init__(
        self,
        *,
        settings: StateSettings,
        transport: SegmentTransport,
        header_ids: Iterable[int] = (),
    ) -> None:
        self._transport = transport
        self._memory = MemoryTier(max_bytes=settings.memory_bytes)
        self._disk = DiskTier(settings.uri, header_ids=header_ids)
        # Segments of unfinished states that are on disk; None after the disk failed for that state.
        self._written: dict[str, set[int] | None] = {}

    def peek(self, content_key: str, expected: StateLayout) -> StateHandle | None:
        """Return a state that is in memory; `expected.mode` is ignored.

        Raises:
            InvalidValueError: The key is not a SHA-256 in hex.
        """
        _check_key(content_key)
        handle = self._memory.get(content_key)
        if handle is not None:
            handle.layout.check_matches(expected)
        return handle

    async def get(self, content_key: str, expected: StateLayout) -> StateHandle | None:
        """Return a ready state from memory, else from disk; `expected.mode` is ignored.

        Damaged or foreign files are deleted with a warning and count as absent.

        Raises:
            InvalidValueError: The key is not a SHA-256 in hex.
        """
        handle = self.peek(content_key, expected)
        if handle is not None:
            return handle
        try:
            state = await asyncio.to_thread(self._disk.read_state, content_key, expected)
        except OSError as error:
            logger.warning("state %s: disk cannot be read: %s", content_key[:12], error)
            return None
        if state is None:
            return None
        refs = [await self._transport.put(segment) for segment in state.segments]
        handle = StateHandle(
            content_key=content_key,
            layout=state.layout,
            segments=tuple(refs),
            num_tokens=state.num_tokens,
            num_bytes=state.num_bytes,
        )
        self._memory.put(handle)
        return handle

    async def adopt_partial(self, content_key: str, layout: StateLayout) -> list[Segment]:
        """Return the good leading segments of an unfinished state, as far as they were written.

        They count as appended. `layout.mode` must agree.

        Raises:
            InvalidValueError: The key is not a SHA-256 in hex.
        """
        _check_key(content_key)
        try:
            segments = await asyncio.to_thread(self._disk.read_partial, content_key, layout)
        except OSError as error:
            logger.warning("state %s: disk cannot be read: %s", content_key[:12], error)
            return []
        self._written[content_key] = set(range(len(segments)))
        return segments

    async def append(
        self, content_key: str, layout: StateLayout, index: int, ref: SegmentRef
    ) -> None:
        """Write one segment of an unfinished state through to disk.

        A disk error is logged once per state, which then stays in memory only.

        Raises:
            InvalidValueError: The key is not a SHA-256 in hex.
            StateError: The segment is gone or does not fit the layout.
        """
        _check_key(content_key)
        written = self._written.setdefault(content_key, set())
        if written is None:
            return
        segment = (await self._transport.get_many([ref]))[0]
        try:
            await _finish_in_thread(
                lambda: self._disk.write_segment(content_key, layout, index, segment)
            )
        except OSError as error:
            self._give_up_disk(content_key, error)
            return
        written.add(index)

    async def put(self, handle: StateHandle, *, is_durable: bool) -> None:
        """Make a complete state available.

        Args:
            handle: The state; kept in memory as the budget allows.
            is_durable: Whether it must also be on disk; segments not yet appended are written.
        """
        _check_key(handle.content_key)
        self._memory.put(handle)
        if is_durable:
            await self._complete_on_disk(handle)
        self._written.pop(handle.content_key, None)

    def release(self, content_key: str) -> None:
        """End an unfinished state without completing it; what is on disk stays for a later try."""
        self._written.pop(content_key, None)

    async def delete(self, content_key: str) -> None:
        """Drop a state from both tiers; absent ones are ignored.

        Raises:
            InvalidValueError: The key is not a SHA-256 in hex.
        """
        _check_key(content_key)
        self._memory.delete(content_key)
        self._written.pop(content_key, None)
        try:
            await asyncio.to_thread(self._disk.delete, content_key)
        except OSError as error:
            logger.warning("state %s: files cannot be deleted: %s", content_key[:12], error)

    async def stats(self) -> StoreStats:
        """Count both tiers; the disk is listed.

        Raises:
            OSError: The disk cannot be listed.
        """
        usage = await asyncio.to_thread(self._disk.usage)
        return StoreStats(
            memory_bytes=self._memory.num_bytes,
            memory_states=len(self._memory),
            disk_bytes=usage.num_bytes,
            disk_states=usage.num_states,
        )

    async def _complete_on_disk(self, handle: StateHandle) -> None:
        key, layout = handle.content_key, handle.layout
        try:
            if await asyncio.to_thread(self._disk.has_manifest, key, layout):
                return
            self._written.setdefault(key, set())
            for index, ref in enumerate(handle.segments):
                if index not in (self._written[key] or ()):
                    await self.append(key, layout, index, ref)
            if self._written[key] is None:
                return
            await _finish_in_thread(
                lambda: self._disk.write_manifest(
                    key,
                    layout,
                    num_segments=len(handle.segments),
                    num_tokens=handle.num_tokens,
                )
            )
        except OSError as error:
            self._give_up_disk(key, error)

    def _give_up_disk(self, content_key: str, error: OSError) -> None:
        self._written[content_key] = None
        logger.warning(
            "state %s: cannot be written to disk, stays in memory only: %s", content_key[:12], error
        )


def _check_key(content_key: str) -> None:
    if not _CONTENT_KEY.fullmatch(content_key):
        raise InvalidValueError("A content key must be the 64 lower-case hex digits of a SHA-256.")


async def _finish_in_thread(write: Callable[[], None]) -> None:
    """Run a write in a thread; when cancelled, wait for it first: nothing may appear after that."""
    writing = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise
