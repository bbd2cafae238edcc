"""One lock per content: a text and its rows are created or deleted together, one at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class ContentLocks:
    """Locks by content key; one that nobody holds or waits for takes no memory.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._locks)

    @asynccontextmanager
    async def hold(self, content_key: str) -> AsyncIterator[None]:
        """Keep every other user of this content out; other contents are not concerned."""
        lock = self._locks.get(content_key)
        if lock is None:
            lock = self._locks[content_key] = asyncio.Lock()
        async with lock:
            yield
