"""The state of a wait for a document, without input or output, so that both clients share it."""

import math
import random
import time
from collections.abc import Callable, Iterator

from orthros_client._problems import error_from_code, error_from_event
from orthros_client._requests import document_path
from orthros_client._retries import RetryPolicy
from orthros_client._sse import EventDecoder
from orthros_client._wire_request import WireRequest, parse_json
from orthros_client.errors import (
    DeadlineExceededError,
    InvalidValueError,
    OrthrosError,
    StreamBrokenError,
)
from orthros_client.types import Document

# Longer than the pause between two heartbeats of the service: after it a watch connects again, so
# that a lost connection is noticed and a wait ends near its timeout.
WATCH_SILENCE_S = 20.0


class DocumentWatch:
    """One wait for a document over as many connections as it takes.

    Args:
        document_id: The document.
        timeout_s: Seconds until the wait fails; None waits as long as the document changes.
        policy: How often a connection that brings nothing is tried again.
        monotonic: Clock in seconds.
        jitter: Draws from [0, 1).
    """

    def __init__(
        self,
        document_id: str,
        *,
        timeout_s: float | None,
        policy: RetryPolicy,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
            raise InvalidValueError(f"timeout_s is {timeout_s}; give a number of seconds above 0.")
        self._document_id = document_id
        self._path = f"{document_path(document_id)}/events"
        self._timeout_s = timeout_s
        self._policy = policy
        self._monotonic = monotonic
        self._jitter = jitter
        self._ends_at = None if timeout_s is None else monotonic() + timeout_s
        self._decoder = EventDecoder()
        self._num_barren = 0
        self._has_news = False
        self._last: Document | None = None

    @property
    def is_done(self) -> bool:
        """Whether the document's ingestion has ended, well or not."""
        return self._last is not None and self._last.status in {"ready", "failed"}

    def next_request(self) -> WireRequest[Document]:
        """The request of the next connection.

        Raises:
            DeadlineExceededError: The wait is over.
        """
        remaining_s = self._remaining_s()
        self._decoder = EventDecoder()
        self._has_news = False
        return WireRequest(
            method="GET",
            path=self._path,
            response_type=Document,
            is_idempotent=True,
            max_total_s=remaining_s,
            max_read_timeout_s=min(
                WATCH_SILENCE_S, math.inf if remaining_s is None else remaining_s
            ),
        )

    def feed(self, chunk: bytes) -> Iterator[Document]:
        """Take the next bytes; they may be comments only, which keep a connection alive.

        Raises:
            DeadlineExceededError: The wait is over.
            OrthrosError: The service sent an `error` event.
        """
        for event in self._decoder.feed(chunk):
            if event.name == "error":
                raise error_from_event(event.data)
            self._last = parse_json(Document, event.data)
            self._has_news = True
            self._num_barren = 0
            yield self._last
            if self.is_done:
                return
        self._remaining_s()

    def result(self) -> Document:
        """The document, now that its ingestion has ended.

        Raises:
            OrthrosError: The ingestion failed; the class is that of the document's error code.
        """
        assert self._last is not None
        if self._last.status != "failed":
            return self._last
        if self._last.error is None:
            raise OrthrosError(f"The ingestion of document {self._document_id!r} failed.")
        raise error_from_code(
            self._last.error.code,
            f"The ingestion of document {self._document_id!r} failed: {self._last.error.message}",
        )

    def reconnect_delay_s(self, cause: OrthrosError | None) -> float:
        """Seconds to wait, now that a connection ended before the ingestion did.

        Raises:
            StreamBrokenError: Too many connections in a row brought nothing.
        """
        if not self._has_news:
            self._num_barren += 1
        if self._num_barren > self._policy.max_retries:
            reason = "connections end without an event." if cause is None else cause.message
            raise StreamBrokenError(
                f"The progress of document {self._document_id!r} cannot be followed: {reason}"
            ) from cause
        delay_s = self._policy.backoff_s(self._num_barren, self._jitter())
        remaining_s = self._remaining_s()
        return delay_s if remaining_s is None else min(delay_s, remaining_s)

    def _remaining_s(self) -> float | None:
        if self._ends_at is None:
            return None
        remaining_s = self._ends_at - self._monotonic()
        if remaining_s > 0:
            return remaining_s
        state = ""
        if self._last is not None:
            done, total = self._last.prefill.tokens_done, self._last.prefill.tokens_total
            state = (
                f" It is {self._last.status}, {done} of {total or 'an unknown number of'} tokens."
            )
        raise DeadlineExceededError(
            f"Document {self._document_id!r} was not ready within {self._timeout_s:g} s.{state} "
            "Its ingestion goes on; wait again with a longer timeout."
        )
