"""Answers as they are written, for both clients."""

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import Self

from orthros_client._answers import AnswerAssembler
from orthros_client._transport import AsyncTransport, Transport
from orthros_client._wire_request import WireRequest
from orthros_client.errors import ConnectionFailedError
from orthros_client.types import Answer, AnswerDelta


class AnswerStream:
    """An answer as it is written: iterate over its deltas, then read `answer`.

    Leaving the `with` block early closes the connection, upon which the service stops its work.

    Example:
        ```python
        with client.ask_stream("Who signed it?", document_ids=["doc_1"]) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.answer.usage)
        ```
    """

    def __init__(self, transport: Transport, request: WireRequest[Answer]) -> None:
        self._assembler = AnswerAssembler()
        self._deltas = self._read(transport, request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[AnswerDelta]:
        return self

    def __next__(self) -> AnswerDelta:
        """The next piece of text.

        Raises:
            StreamBrokenError: The stream ended without its `completed` event.
            OrthrosError: The service refused, or ended the stream with an error.
        """
        return next(self._deltas)

    def close(self) -> None:
        """Close the connection; does nothing where the stream has ended."""
        self._deltas.close()

    @property
    def text(self) -> str:
        """What has arrived so far."""
        return self._assembler.text

    @property
    def answer(self) -> Answer:
        """The finished answer.

        Raises:
            StreamBrokenError: The stream has not been read to its end.
        """
        return self._assembler.answer

    def _read(
        self, transport: Transport, request: WireRequest[Answer]
    ) -> Generator[AnswerDelta, None, None]:
        with transport.stream(request) as chunks:
            cause: ConnectionFailedError | None = None
            try:
                for chunk in chunks:
                    yield from self._assembler.feed(chunk)
                    if self._assembler.is_complete:
                        return
            except ConnectionFailedError as error:
                cause = error
            self._assembler.end(cause)


class AsyncAnswerStream:
    """An answer as it is written, for `async for`; see `AnswerStream`."""

    def __init__(self, transport: AsyncTransport, request: WireRequest[Answer]) -> None:
        self._assembler = AnswerAssembler()
        self._deltas = self._read(transport, request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[AnswerDelta]:
        return self

    async def __anext__(self) -> AnswerDelta:
        """The next piece of text; see `AnswerStream.__next__` for the errors."""
        return await anext(self._deltas)

    async def close(self) -> None:
        """Close the connection; does nothing where the stream has ended."""
        await self._deltas.aclose()

    @property
    def text(self) -> str:
        """What has arrived so far."""
        return self._assembler.text

    @property
    def answer(self) -> Answer:
        """The finished answer.

        Raises:
            StreamBrokenError: The stream has not been read to its end.
        """
        return self._assembler.answer

    async def _read(
        self, transport: AsyncTransport, request: WireRequest[Answer]
    ) -> AsyncGenerator[AnswerDelta, None]:
        async with transport.stream(request) as chunks:
            cause: ConnectionFailedError | None = None
            try:
                async for chunk in chunks:
                    for delta in self._assembler.feed(chunk):
                        yield delta
                    if self._assembler.is_complete:
                        return
            except ConnectionFailedError as error:
                cause = error
            self._assembler.end(cause)
