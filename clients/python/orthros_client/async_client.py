"""The asynchronous client; `client.py` tells the arguments and errors of each method in full."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack

import httpx

from orthros_client import _requests as requests
from orthros_client._config import (
    DEFAULT_BASE_URL,
    DEFAULT_CONNECT_TIMEOUT_S,
    DEFAULT_READ_TIMEOUT_S,
    DEFAULT_WAIT_TIMEOUT_S,
    TransportConfig,
)
from orthros_client._requests import DocumentSource
from orthros_client._retries import RetryPolicy
from orthros_client._transport import AsyncTransport, SentCallback
from orthros_client._watch import DocumentWatch
from orthros_client.documents import AsyncDocuments
from orthros_client.errors import ConnectionFailedError, OrthrosError, ResponseTimeoutError
from orthros_client.options import AskOptions, SummaryOptions
from orthros_client.streams import AsyncAnswerStream
from orthros_client.types import Answer, Document, ModelCard, PrefillModeChoice, TokenCount


class AsyncOrthrosClient:
    """Talks to an Orthros service on an asyncio event loop.

    Example:
        ```python
        async with AsyncOrthrosClient("http://127.0.0.1:8000") as client:
            document = await client.upload(Path("report.txt"))
            await client.wait_until_ready(document.id)
            questions = ["Who signed it?", "When?", "Where?"]
            asks = [client.ask(question, document_ids=[document.id]) for question in questions]
            for answer in await asyncio.gather(*asks):
                print(answer.text)
        ```

    Args:
        base_url: Address of the service.
        connect_timeout_s: Seconds to establish a connection.
        read_timeout_s: Seconds that the service may keep silent.
        max_retries: Most times that a request is sent again; see `OrthrosClient`.
        max_retry_s: No retry begins later than this after the first attempt.
        headers: Further headers of every request.
        transport: What carries the requests, for tests; None is the network.

    Raises:
        InvalidValueError: An argument is not allowed.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        read_timeout_s: float = DEFAULT_READ_TIMEOUT_S,
        max_retries: int = 3,
        max_retry_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        config = TransportConfig(
            base_url=base_url,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
            retries=RetryPolicy(max_retries=max_retries, max_retry_s=max_retry_s),
            headers={} if headers is None else headers,
        )
        self._transport = AsyncTransport(config, transport=transport)
        self.documents = AsyncDocuments(self._transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; the client cannot be used afterwards."""
        await self._transport.close()

    async def upload(
        self,
        source: DocumentSource,
        *,
        title: str | None = None,
        metadata: Mapping[str, str] | None = None,
        prefill_mode: PrefillModeChoice = "auto",
        on_sent: SentCallback | None = None,
    ) -> Document:
        """Store a document and start its ingestion; a path is read in the calling thread."""
        request = requests.upload_request(
            source, title=title, metadata=metadata, prefill_mode=prefill_mode
        )
        return await self._transport.send(request, on_sent=on_sent)

    def events(
        self, document_id: str, *, timeout_s: float | None = None
    ) -> AsyncIterator[Document]:
        """Follow a document until its ingestion ends, for `async for`."""
        return self._follow(self._watch(document_id, timeout_s))

    async def wait_until_ready(
        self,
        document_id: str,
        *,
        timeout_s: float | None = DEFAULT_WAIT_TIMEOUT_S,
        on_progress: Callable[[Document], None] | None = None,
    ) -> Document:
        """Wait until a document can be asked."""
        watch = self._watch(document_id, timeout_s)
        async with aclosing(self._follow(watch)) as documents:
            async for document in documents:
                if on_progress is not None:
                    on_progress(document)
        return watch.result()

    async def ask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Ask about ingested documents or an inline text; see `AskOptions` for the arguments."""
        request = requests.answer_request(question, options, is_stream=False)
        return await self._transport.send(request)

    def ask_stream(self, question: str, **options: Unpack[AskOptions]) -> AsyncAnswerStream:
        """Like `ask`, as it is written; nothing is sent before the first delta is read."""
        request = requests.answer_request(question, options, is_stream=True)
        return AsyncAnswerStream(self._transport, request)

    async def summarize(self, **options: Unpack[SummaryOptions]) -> Answer:
        """Summarize ingested documents or an inline text; see `SummaryOptions`."""
        return await self._transport.send(requests.summary_request(options, is_stream=False))

    def summarize_stream(self, **options: Unpack[SummaryOptions]) -> AsyncAnswerStream:
        """Like `summarize`, with the text as it is written."""
        request = requests.summary_request(options, is_stream=True)
        return AsyncAnswerStream(self._transport, request)

    async def count_tokens(self, text: str) -> TokenCount:
        """Count a text's tokens, and learn how it would be ingested."""
        return await self._transport.send(requests.token_count_request(text))

    async def models(self) -> list[ModelCard]:
        """The served models."""
        return (await self._transport.send(requests.models_request())).data

    async def healthz(self) -> bool:
        """Whether the service's process is well; raises where it cannot be reached."""
        return await self._transport.probe("/healthz")

    async def readyz(self) -> bool:
        """Whether the service can take work; raises where it cannot be reached."""
        return await self._transport.probe("/readyz")

    def _watch(self, document_id: str, timeout_s: float | None) -> DocumentWatch:
        return self._transport.config.watch(document_id, timeout_s)

    async def _follow(self, watch: DocumentWatch) -> AsyncGenerator[Document, None]:
        while True:
            cause: OrthrosError | None = None
            async with self._transport.stream(watch.next_request()) as chunks:
                try:
                    async for chunk in chunks:
                        for document in watch.feed(chunk):
                            yield document
                        if watch.is_done:
                            return
                except (ConnectionFailedError, ResponseTimeoutError) as error:
                    cause = error
            await self._transport.sleep(watch.reconnect_delay_s(cause))
