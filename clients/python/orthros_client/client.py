"""The synchronous client."""

from collections.abc import Callable, Iterator, Mapping
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
from orthros_client._transport import SentCallback, Transport
from orthros_client._watch import DocumentWatch
from orthros_client.documents import Documents
from orthros_client.errors import ConnectionFailedError, OrthrosError, ResponseTimeoutError
from orthros_client.options import AskOptions, SummaryOptions
from orthros_client.streams import AnswerStream
from orthros_client.types import (
    Answer,
    Document,
    ModelCard,
    PrefillModeChoice,
    TokenCount,
)


class OrthrosClient:
    """Talks to an Orthros service and waits for its answers; safe to use from several threads.

    Example:
        ```python
        with OrthrosClient("http://127.0.0.1:8000") as client:
            document = client.upload(Path("report.txt"))
            client.wait_until_ready(document.id)
            with client.ask_stream("Who signed it?", document_ids=[document.id]) as stream:
                for delta in stream:
                    print(delta.text, end="", flush=True)
            for citation in stream.answer.citations:
                print(citation.start_char, citation.quote)
        ```

    Args:
        base_url: Address of the service.
        connect_timeout_s: Seconds to establish a connection.
        read_timeout_s: Seconds that the service may keep silent, also before an answer that is not
            streamed; a longer `deadline_s` of a request extends it.
        max_retries: Most times that a request is sent again. That happens when no connection came
            about, when the service refused with a retryable 429, 503 or 504, and, for requests that
            change nothing, when an answer was lost. A stream that has begun is never sent again.
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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        config = TransportConfig(
            base_url=base_url,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
            retries=RetryPolicy(max_retries=max_retries, max_retry_s=max_retry_s),
            headers={} if headers is None else headers,
        )
        self._transport = Transport(config, transport=transport)
        self.documents = Documents(self._transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; the client cannot be used afterwards."""
        self._transport.close()

    def upload(
        self,
        source: DocumentSource,
        *,
        title: str | None = None,
        metadata: Mapping[str, str] | None = None,
        prefill_mode: PrefillModeChoice = "auto",
        on_sent: SentCallback | None = None,
    ) -> Document:
        """Store a document and start its ingestion; `wait_until_ready` waits for the end of that.

        Args:
            source: A text as `str`, UTF-8 as `bytes`, or the path of a UTF-8 file.
            title: A name for people; None takes the file's name, if there is one.
            metadata: Pairs of short strings to keep with the document.
            prefill_mode: "auto" lets the length decide.
            on_sent: Is told the bytes sent and all bytes, now and then.

        Raises:
            MalformedRequestError: The bytes are not UTF-8.
            OSError: The file cannot be read.
            OrthrosError: The service refused, or cannot be reached.
        """
        request = requests.upload_request(
            source, title=title, metadata=metadata, prefill_mode=prefill_mode
        )
        return self._transport.send(request, on_sent=on_sent)

    def events(self, document_id: str, *, timeout_s: float | None = None) -> Iterator[Document]:
        """Follow a document until its ingestion ends, over as many connections as that takes.

        Args:
            document_id: The document.
            timeout_s: Seconds until `DeadlineExceededError`; None follows it to its end.

        Yields:
            The document whenever it changed; the last one is "ready" or "failed".
        """
        return self._follow(self._watch(document_id, timeout_s))

    def wait_until_ready(
        self,
        document_id: str,
        *,
        timeout_s: float | None = DEFAULT_WAIT_TIMEOUT_S,
        on_progress: Callable[[Document], None] | None = None,
    ) -> Document:
        """Wait until a document can be asked.

        Raises:
            DeadlineExceededError: It was not ready within timeout_s; its ingestion goes on.
            OrthrosError: The ingestion failed; the class is that of the document's error code.
        """
        watch = self._watch(document_id, timeout_s)
        for document in self._follow(watch):
            if on_progress is not None:
                on_progress(document)
        return watch.result()

    def ask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Ask about ingested documents or an inline text; see `AskOptions` for the arguments."""
        return self._transport.send(requests.answer_request(question, options, is_stream=False))

    def ask_stream(self, question: str, **options: Unpack[AskOptions]) -> AnswerStream:
        """Like `ask`, as it is written; nothing is sent before the first delta is read."""
        request = requests.answer_request(question, options, is_stream=True)
        return AnswerStream(self._transport, request)

    def summarize(self, **options: Unpack[SummaryOptions]) -> Answer:
        """Summarize ingested documents or an inline text; see `SummaryOptions`."""
        return self._transport.send(requests.summary_request(options, is_stream=False))

    def summarize_stream(self, **options: Unpack[SummaryOptions]) -> AnswerStream:
        """Like `summarize`, with the text as it is written."""
        return AnswerStream(self._transport, requests.summary_request(options, is_stream=True))

    def count_tokens(self, text: str) -> TokenCount:
        """Count a text's tokens, and learn how it would be ingested."""
        return self._transport.send(requests.token_count_request(text))

    def models(self) -> list[ModelCard]:
        """The served models."""
        return self._transport.send(requests.models_request()).data

    def healthz(self) -> bool:
        """Whether the service's process is well; raises where it cannot be reached."""
        return self._transport.probe("/healthz")

    def readyz(self) -> bool:
        """Whether the service can take work; raises where it cannot be reached."""
        return self._transport.probe("/readyz")

    def _watch(self, document_id: str, timeout_s: float | None) -> DocumentWatch:
        return self._transport.config.watch(document_id, timeout_s)

    def _follow(self, watch: DocumentWatch) -> Iterator[Document]:
        while True:
            cause: OrthrosError | None = None
            with self._transport.stream(watch.next_request()) as chunks:
                try:
                    for chunk in chunks:
                        yield from watch.feed(chunk)
                        if watch.is_done:
                            return
                except (ConnectionFailedError, ResponseTimeoutError) as error:
                    cause = error
            self._transport.sleep(watch.reconnect_delay_s(cause))
