"""Where one sequence's outputs wait for the caller that reads them."""

import asyncio

from orthros_service.engine.types import DecodeDelta, DecodeFinished, DecodeOutput
from orthros_service.errors import OrthrosError


class Outlet:
    """Holds at most one delta and the end of one sequence.

    Deltas that are not read yet are merged, so a slow reader never holds up the batch and costs no
    more than the answer's own text. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._num_tokens = 0
        self._end: DecodeFinished | OrthrosError | None = None
        self._is_readable = asyncio.Event()
        self._has_ended = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether the sequence will put nothing more."""
        return self._has_ended.is_set()

    def put(self, delta: DecodeDelta) -> None:
        """Add decoded text; nothing is shown until there is some."""
        self._num_tokens += delta.num_tokens
        if delta.text:
            self._parts.append(delta.text)
            self._is_readable.set()

    def end(self, output: DecodeFinished | OrthrosError) -> None:
        """End the sequence; what comes later is dropped."""
        if self._end is None:
            self._end = output
            self._has_ended.set()
            self._is_readable.set()

    async def take(self) -> DecodeOutput:
        """Wait for the next output: all text that is there, or else the end.

        Raises:
            OrthrosError: The sequence ended with it; text that is still there is dropped.
        """
        await self._is_readable.wait()
        if isinstance(self._end, OrthrosError):
            raise self._end
        if self._parts:
            delta = DecodeDelta(text="".join(self._parts), num_tokens=self._num_tokens)
            self._parts, self._num_tokens = [], 0
            if self._end is None:
                self._is_readable.clear()
            return delta
        assert self._end is not None
        return self._end

    async def rest(self, seconds: float) -> None:
        """Let text gather for so long, or until the sequence ends."""
        if seconds <= 0 or self._has_ended.is_set():
            return
        try:
            async with asyncio.timeout(seconds):
                await self._has_ended.wait()
        except TimeoutError:
            return
