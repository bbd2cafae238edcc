"""Streams on real sockets: clients that leave, and text that could break an event."""

import asyncio
import json
import time
from types import SimpleNamespace

import httpx
import httpx_sse
import pytest

from orthros_service.gateway.request_scope import RequestScope
from orthros_service.gateway.request_state import RequestState
from orthros_service.types import IngestProgress

ASK = {"text": "Some text.", "question": "q"}
CHAT = {"model": "tiny-model", "messages": [{"role": "user", "content": "q"}]}


async def until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def _leave_when(client, path, body, condition):
    """Send a request, and close its connection without an answer once something holds."""
    task = asyncio.create_task(client.post(path, json=body))
    await until(condition)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _leave_within(client, path, body):
    """Send a request, and close its connection after the first chunk of the answer."""
    async with client.stream("POST", path, json=body) as response:
        await anext(response.aiter_raw())


@pytest.mark.parametrize(
    ("path", "body", "phase"),
    [
        ("/v1/answers", ASK | {"stream": True}, "decode"),
        ("/v1/answers", ASK | {"stream": True}, "prefill"),
        ("/v1/answers", ASK, "prefill"),
        ("/v1/summaries", {"text": "Some text.", "stream": True}, "decode"),
        ("/v1/chat/completions", CHAT | {"stream": True}, "decode"),
        ("/v1/chat/completions", CHAT, "prefill"),
    ],
)
async def test_a_client_that_leaves_ends_its_work_and_frees_its_slot(
    service, serve, path, body, phase
):
    async with httpx.AsyncClient(base_url=serve(service.app)) as client:
        if phase == "decode":
            service.backend.script = ["Mr. ", "hang"]
            await _leave_within(client, path, body)
        else:
            service.backend.script = ["hang"]
            await _leave_when(client, path, body, lambda: service.backend.num_active == 1)
        await until(lambda: service.backend.num_active == 0)
        (request,) = service.backend.requests
        await until(lambda: service.backend.cancelled == [request.request_id])
        await until(lambda: service.metric("orthros_requests_in_flight") == 0)
        await until(
            lambda: (
                service.metric("orthros_requests_total", outcome="cancelled", code="cancelled") == 1
            )
        )
        assert service.metric("orthros_cancellations_total", phase=phase) == 1
        assert service.metric("orthros_cancel_release_seconds_count", phase=phase) == 1
        service.backend.script = ["ok"]
        assert (await client.post("/v1/answers", json=ASK)).status_code == 200


async def test_a_client_that_leaves_the_queue_never_reaches_the_backend(service, serve):
    service.backend.script = ["hang", "ok"]
    async with httpx.AsyncClient(base_url=serve(service.app)) as client:
        running = [asyncio.create_task(client.post("/v1/answers", json=ASK)) for _ in range(2)]
        await until(lambda: service.backend.num_active == 2)
        await _leave_when(
            client, "/v1/answers", ASK, lambda: service.metric("orthros_queue_depth") == 1
        )
        await until(lambda: service.metric("orthros_queue_depth") == 0)
        assert service.metric("orthros_cancellations_total", phase="queue") == 1
        service.backend.is_open = True
        for task in running:
            assert (await task).json()["text"] == "ok"
        assert len(service.backend.requests) == 2


async def test_an_ingestion_survives_whoever_watches_it(service, serve):
    service.backend.progress = IngestProgress(
        status="ingesting", mode="linear", num_tokens=100, tokens_done=10, tokens_per_s=5.0
    )
    document_id = await service.upload()
    path = f"/v1/documents/{document_id}/events"
    async with httpx.AsyncClient(base_url=serve(service.app)) as client:
        for _ in range(3):
            async with client.stream("GET", path) as response:
                event = await anext(httpx_sse.EventSource(response).aiter_sse())
                assert event.json()["status"] == "ingesting"
        await until(
            lambda: service.metric("orthros_requests_total", endpoint="document_events") == 3
        )
        assert service.backend.forgotten == []
        assert (await client.get(f"/v1/documents/{document_id}")).json()["status"] == "ingesting"


@pytest.mark.parametrize("path", ["/v1/answers", "/v1/chat/completions"])
async def test_no_character_of_an_answer_can_break_an_event(service, path):
    text = "a\u2028b\u0085c\r\nd\x00e\x1ff\u2029g\x0bh\x0ci\n\nevent: completed\ndata: {}\n\n😀é"
    service.backend.script = [text]
    body = (ASK if path == "/v1/answers" else CHAT) | {"stream": True}
    response = await service.client.post(path, json=body)
    raw = response.content.decode("ascii")

    def text_of(data):
        if path == "/v1/answers":
            return data["text"] if set(data) == {"text"} else ""
        return data["choices"][0]["delta"].get("content", "") if data["choices"] else ""

    def joined(lines):
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return "".join(text_of(json.loads(one)) for one in data if one != "[DONE]")

    assert joined(raw.split("\n")) == text
    assert joined(raw.splitlines()) == text
    parsed = [event.data for event in httpx_sse.EventSource(response).iter_sse()]
    assert "".join(text_of(json.loads(one)) for one in parsed if one != "[DONE]") == text


async def test_streams_are_neither_cached_nor_buffered_by_proxies(service):
    response = await service.client.post("/v1/answers", json=ASK | {"stream": True})
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("has_length", [True, False])
async def test_a_client_gets_its_413_while_it_still_sends_a_body_that_is_far_too_large(
    service, serve, has_length
):
    block = b"x" * 100_000

    async def body():
        for _ in range(500):
            yield block

    headers = {"Content-Type": "text/plain"}
    if has_length:
        headers["Content-Length"] = str(500 * len(block))
    async with httpx.AsyncClient(base_url=serve(service.app)) as client:
        response = await client.post("/v1/documents", content=body(), headers=headers)
        assert response.status_code == 413
        assert response.json()["code"] == "document_too_large"
        assert (await client.get("/healthz")).status_code == 200
    assert service.backend.ingested == []


async def test_a_client_that_leaves_with_the_whole_answer_has_cancelled_nothing():
    """The scope is told of a departure after the last event, as a server does it."""
    reached = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        RequestState.of(scope).is_delivered = len(reached) == 0
        reached.append(scope)
        raise asyncio.CancelledError

    async def send(message):
        pass

    counted = []
    metrics = SimpleNamespace(
        increment=lambda name, **labels: counted.append(labels["outcome"]),
        observe=lambda *args, **labels: None,
    )
    middleware = RequestScope(app, metrics=metrics)
    for _ in range(2):
        with pytest.raises(asyncio.CancelledError):
            await middleware({"type": "http", "method": "GET", "headers": []}, None, send)
    assert counted == ["ok", "cancelled"]


class TaskCancelledError(Exception):
    """What Ray Serve raises in place of a message once the client has left."""


@pytest.mark.parametrize("num_messages", [0, 1])
@pytest.mark.parametrize("path", ["/v1/answers", "/v1/documents"])
async def test_a_server_that_raises_instead_of_saying_goodbye_means_a_client_that_left(
    service, caplog, path, num_messages
):
    """It raises once, while the body is read or while the work runs, and then never answers."""
    service.backend.script = ["hang"]
    body = json.dumps(ASK if path == "/v1/answers" else {"text": "t"}).encode()
    is_whole = path == "/v1/answers"
    messages = [{"type": "http.request", "body": body, "more_body": not is_whole}][:num_messages]
    num_raised = 0

    async def receive():
        nonlocal num_raised
        if messages:
            return messages.pop(0)
        if num_messages and is_whole:
            await until(lambda: service.backend.num_active == 1)
        num_raised += 1
        if num_raised > 1:
            await asyncio.Event().wait()
        raise TaskCancelledError

    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
    }
    async with asyncio.timeout(3):
        await service.app(scope, receive, send)
    assert sent[0]["status"] == 499
    assert service.metric("orthros_requests_total", outcome="cancelled", code="cancelled") == 1
    assert service.metric("orthros_requests_total", code="internal") == 0
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert service.backend.num_active == 0


async def test_a_bad_form_that_has_come_whole_is_answered_at_once_and_keeps_its_connection(
    service, serve
):
    bad = b"--b\r\nno header\r\n\r\nx\r\n--b--\r\n" + b"y" * 1000
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    started = time.monotonic()
    async with httpx.AsyncClient(base_url=serve(service.app)) as client:
        response = await client.post("/v1/documents", content=bad, headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, "malformed_request")
    assert "connection" not in response.headers
    assert time.monotonic() - started < 2
