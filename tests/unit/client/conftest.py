"""Answers of a service as bytes, a clock that does not wait, and clients that talk to neither."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import pytest

from orthros_client import AsyncOrthrosClient, OrthrosClient
from orthros_client._config import TransportConfig
from orthros_client._retries import RetryPolicy
from orthros_client._transport import AsyncTransport, Transport

BASE_URL = "http://service.test"


class Wire:
    """What a service would send."""

    @staticmethod
    def document(status: str = "ready", **changes: Any) -> dict[str, Any]:
        prefill = {"mode": "full", "tokens_done": 10, "tokens_total": 10, "tokens_per_s": 100.0}
        return {
            "id": "doc_1",
            "object": "document",
            "status": status,
            "title": "A title",
            "metadata": {},
            "num_chars": 40,
            "num_tokens": 10,
            "prefill": prefill,
            "error": None,
            "created_at": "2026-01-01T00:00:00Z",
            **changes,
        }

    @staticmethod
    def answer(text: str = "Ishmael.", **changes: Any) -> dict[str, Any]:
        return {
            "id": "ans_1",
            "object": "answer",
            "model": "tiny",
            "converted": False,
            "text": text,
            "finish_reason": "stop",
            "citations": [],
            "usage": {
                "document_tokens": 10,
                "prompt_tokens": 5,
                "completion_tokens": 3,
                "max_tokens": 256,
            },
            "timings": {"total_s": 0.5},
            "warnings": [],
            **changes,
        }

    @staticmethod
    def problem(code: str, status: int, **changes: Any) -> dict[str, Any]:
        return {
            "type": f"urn:orthros:problem:{code}",
            "title": "A title",
            "status": status,
            "detail": f"What was wrong with {code}.",
            "code": code,
            "request_id": "req_1",
            **changes,
        }

    def refusal(
        self,
        code: str,
        status: int,
        *,
        headers: dict[str, str] | None = None,
        **changes: Any,
    ) -> httpx.Response:
        return httpx.Response(
            status,
            headers={"Content-Type": "application/problem+json", **(headers or {})},
            content=json.dumps(self.problem(code, status, **changes)),
        )

    @staticmethod
    def event(name: str, data: Any) -> bytes:
        return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()

    @staticmethod
    def stream(chunks: Iterable[bytes]) -> httpx.Response:
        return httpx.Response(
            200, headers={"Content-Type": "text/event-stream"}, stream=_Chunks(chunks)
        )


class _Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that both kinds of clients can read."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks

    async def __aiter__(self) -> Any:
        for chunk in self._chunks:
            yield chunk


class Clock:
    """Time that passes only when someone sleeps; keeps what was slept."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def async_sleep(self, seconds: float) -> None:
        self.sleep(seconds)


class Script:
    """A service that gives its replies in order and keeps the requests; an exception is raised."""

    def __init__(self, *replies: httpx.Response | Exception | Callable[[], httpx.Response]) -> None:
        self.replies = list(replies)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return self._next(request)

    async def async_call(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return self._next(request)

    def _next(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        assert self.replies, f"no reply left for {request.method} {request.url}"
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, httpx.Response) else reply()

    @property
    def body(self) -> Any:
        return json.loads(self.requests[-1].content)


MakeClient = Callable[..., OrthrosClient]
MakeAsyncClient = Callable[..., AsyncOrthrosClient]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def script() -> type[Script]:
    return Script


def _config(clock: Clock, policy: dict[str, Any]) -> TransportConfig:
    return TransportConfig(
        base_url=BASE_URL,
        connect_timeout_s=5.0,
        read_timeout_s=660.0,
        retries=RetryPolicy(**policy),
        monotonic=clock.monotonic,
        jitter=lambda: 1.0,
    )


@pytest.fixture
def make_client(clock: Clock) -> Iterator[MakeClient]:
    """A client over a `Script`, on the test's clock and without jitter."""
    clients: list[OrthrosClient] = []

    def make(service: Script, **policy: Any) -> OrthrosClient:
        carrier = httpx.MockTransport(service)
        client = OrthrosClient(BASE_URL, transport=carrier)
        transport = Transport(_config(clock, policy), transport=carrier, sleep=clock.sleep)
        client._transport = client.documents._transport = transport
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def make_async_client(clock: Clock) -> MakeAsyncClient:
    """The same for the asynchronous client; use it in an `async with`."""

    def make(service: Script, **policy: Any) -> AsyncOrthrosClient:
        carrier = httpx.MockTransport(service.async_call)
        client = AsyncOrthrosClient(BASE_URL, transport=carrier)
        transport = AsyncTransport(
            _config(clock, policy), transport=carrier, sleep=clock.async_sleep
        )
        client._transport = client.documents._transport = transport
        return client

    return make
