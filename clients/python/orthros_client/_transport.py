"""Sending requests, with retries. The sync and the async half differ in how they wait only."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import httpx

from orthros_client._config import TransportConfig
from orthros_client._problems import error_from_response, httpx_errors_mapped
from orthros_client._wire_request import QUICK_READ_TIMEOUT_S, ResponseT, WireRequest
from orthros_client.errors import OrthrosError, UnexpectedResponseError

# Servers close idle connections after about 5 s; using one just then would lose a request.
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=2.0)
UPLOAD_CHUNK_BYTES = 64 * 1024
HTTP_OK = 200
HTTP_UNAVAILABLE = 503

ResultT = TypeVar("ResultT")
SentCallback = Callable[[int, int], None]


class Transport:
    """Sends requests and blocks meanwhile; safe to use from several threads."""

    def __init__(
        self,
        config: TransportConfig,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config
        self.sleep = sleep
        self._client = httpx.Client(
            base_url=config.base_url,
            headers=config.all_headers(),
            limits=LIMITS,
            trust_env=not config.is_loopback,
            transport=transport,
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def send(
        self, request: WireRequest[ResponseT], *, on_sent: SentCallback | None = None
    ) -> ResponseT:
        """Send until an answer came that is final.

        Args:
            request: What to send.
            on_sent: Is told the bytes of the body that were sent, and all of them.

        Raises:
            OrthrosError: See `WireRequest.parse` and `httpx_errors_mapped`.
        """

        def attempt() -> ResponseT:
            body = request.body
            content = body if body is None or on_sent is None else _pieces(body, on_sent)
            with httpx_errors_mapped(self.config.shown_url):
                response = self._client.send(_build(self._client, self.config, request, content))
            return request.parse(response.status_code, response.headers, response.content)

        return self._retry(request, attempt)

    @contextmanager
    def stream(self, request: WireRequest[ResponseT]) -> Iterator[Iterator[bytes]]:
        """Open a stream; that is tried again until it has begun, and never afterwards."""

        def attempt() -> httpx.Response:
            with httpx_errors_mapped(self.config.shown_url):
                built = _build(self._client, self.config, request, request.body, is_stream=True)
                response = self._client.send(built, stream=True)
                if not _is_event_stream(response):
                    response.read()
                    response.close()
            _check_event_stream(response)
            return response

        response = self._retry(request, attempt)
        try:
            yield self._chunks(response)
        finally:
            response.close()

    def probe(self, path: str) -> bool:
        """Whether a health endpoint says yes (200) or no (503); a single attempt."""
        with httpx_errors_mapped(self.config.shown_url):
            response = self._client.get(path, timeout=self.config.timeout(QUICK_READ_TIMEOUT_S))
        return _probe_result(response.status_code, response.headers, response.content)

    def _retry(self, request: WireRequest[ResponseT], attempt: Callable[[], ResultT]) -> ResultT:
        attempts = self.config.attempts(request)
        while True:
            try:
                return attempt()
            except OrthrosError as error:
                delay_s = attempts.next_delay_s(error)
                if delay_s is None:
                    raise
            self.sleep(delay_s)

    def _chunks(self, response: httpx.Response) -> Iterator[bytes]:
        with httpx_errors_mapped(self.config.shown_url):
            yield from response.iter_bytes()


class AsyncTransport:
    """Sends requests on an asyncio event loop."""

    def __init__(
        self,
        config: TransportConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.config = config
        self.sleep = sleep
        self._client = httpx.AsyncClient(
            base_url=config.base_url,
            headers=config.all_headers(),
            limits=LIMITS,
            trust_env=not config.is_loopback,
            transport=transport,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def send(
        self, request: WireRequest[ResponseT], *, on_sent: SentCallback | None = None
    ) -> ResponseT:
        """Send until an answer came that is final; see `Transport.send`."""

        async def attempt() -> ResponseT:
            body = request.body
            content = body if body is None or on_sent is None else _async_pieces(body, on_sent)
            with httpx_errors_mapped(self.config.shown_url):
                built = _build(self._client, self.config, request, content)
                response = await self._client.send(built)
            return request.parse(response.status_code, response.headers, response.content)

        return await self._retry(request, attempt)

    @asynccontextmanager
    async def stream(self, request: WireRequest[ResponseT]) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a stream; that is tried again until it has begun, and never afterwards."""

        async def attempt() -> httpx.Response:
            with httpx_errors_mapped(self.config.shown_url):
                built = _build(self._client, self.config, request, request.body, is_stream=True)
                response = await self._client.send(built, stream=True)
                if not _is_event_stream(response):
                    await response.aread()
                    await response.aclose()
            _check_event_stream(response)
            return response

        response = await self._retry(request, attempt)
        try:
            yield self._chunks(response)
        finally:
            await response.aclose()

    async def probe(self, path: str) -> bool:
        """Whether a health endpoint says yes (200) or no (503); a single attempt."""
        with httpx_errors_mapped(self.config.shown_url):
            timeout = self.config.timeout(QUICK_READ_TIMEOUT_S)
            response = await self._client.get(path, timeout=timeout)
        return _probe_result(response.status_code, response.headers, response.content)

    async def _retry(
        self, request: WireRequest[ResponseT], attempt: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        attempts = self.config.attempts(request)
        while True:
            try:
                return await attempt()
            except OrthrosError as error:
                delay_s = attempts.next_delay_s(error)
                if delay_s is None:
                    raise
            await self.sleep(delay_s)

    async def _chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        with httpx_errors_mapped(self.config.shown_url):
            async for chunk in response.aiter_bytes():
                yield chunk


def _build(
    client: httpx.Client | httpx.AsyncClient,
    config: TransportConfig,
    request: WireRequest[ResponseT],
    content: bytes | Iterator[bytes] | AsyncIterator[bytes] | None,
    *,
    is_stream: bool = False,
) -> httpx.Request:
    headers = {"Accept": "text/event-stream"} if is_stream else {}
    if request.body is not None:
        # The length is known although the body may go out in pieces.
        headers |= {"Content-Type": "application/json", "Content-Length": str(len(request.body))}
    return client.build_request(
        request.method,
        request.path,
        params=request.params or None,
        content=content,
        headers=headers,
        timeout=config.timeout(request.read_timeout_s(config.read_timeout_s)),
    )


def _pieces(body: bytes, on_sent: SentCallback) -> Iterator[bytes]:
    for start in range(0, len(body), UPLOAD_CHUNK_BYTES):
        piece = body[start : start + UPLOAD_CHUNK_BYTES]
        yield piece
        # The sender comes back for more only after it has written this piece.
        on_sent(start + len(piece), len(body))


async def _async_pieces(body: bytes, on_sent: SentCallback) -> AsyncIterator[bytes]:
    for piece in _pieces(body, on_sent):
        yield piece


def _is_event_stream(response: httpx.Response) -> bool:
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return response.status_code == HTTP_OK and media_type == "text/event-stream"


def _check_event_stream(response: httpx.Response) -> None:
    if _is_event_stream(response):
        return
    if response.is_success:
        raise UnexpectedResponseError(
            "The answer is not an event stream. Check that the base URL is that of the service.",
            status=response.status_code,
        )
    raise error_from_response(response.status_code, response.headers, response.content)


def _probe_result(status: int, headers: Mapping[str, str], body: bytes) -> bool:
    if status not in {HTTP_OK, HTTP_UNAVAILABLE}:
        raise error_from_response(status, headers, body)
    return status == HTTP_OK
