"""Waiting for a document: over broken connections, to its end, and not longer than asked."""

import httpx
import pytest

from orthros_client import errors


def _progress(wire, done, status="ingesting"):
    prefill = {"mode": "linear", "tokens_done": done, "tokens_total": 10, "tokens_per_s": 5.0}
    return wire.event("progress", wire.document(status, prefill=prefill))


def _failed(wire, code, message):
    return wire.event("failed", wire.document("failed", error={"code": code, "message": message}))


def test_every_change_is_told_and_the_ready_document_returned(wire, script, make_client):
    chunks = [_progress(wire, 0, "queued"), _progress(wire, 5), _progress(wire, 10, "ready")]
    seen = []
    service = script(wire.stream(chunks))
    document = make_client(service).wait_until_ready(
        "doc_1", on_progress=lambda document: seen.append(document.prefill.tokens_done)
    )
    assert document.status == "ready"
    assert seen == [0, 5, 10]
    assert service.requests[0].url.path == "/v1/documents/doc_1/events"


def test_a_broken_connection_is_made_again(wire, script, make_client, clock):
    def breaking():
        yield _progress(wire, 3)
        raise httpx.ReadError("reset")

    service = script(
        wire.stream(breaking()),
        wire.stream([_progress(wire, 6)]),
        httpx.ConnectError("refused"),
        wire.stream([_progress(wire, 10, "ready")]),
    )
    events = list(make_client(service).events("doc_1"))
    assert [event.prefill.tokens_done for event in events] == [3, 6, 10]
    assert len(service.requests) == 4


def test_silence_is_no_failure_while_each_connection_brings_something(wire, script, make_client):
    def silent():
        yield _progress(wire, 0, "queued")
        raise httpx.ReadTimeout("silent")

    service = script(
        *(wire.stream(silent()) for _ in range(9)), wire.stream([_progress(wire, 10, "ready")])
    )
    assert make_client(service, max_retries=1).wait_until_ready("doc_1").status == "ready"


def test_connections_that_bring_nothing_end_the_wait(wire, script, make_client, clock):
    service = script(*(wire.stream([b": heartbeat\n\n"]) for _ in range(4)))
    with pytest.raises(errors.StreamBrokenError, match="doc_1"):
        list(make_client(service, max_retries=3).events("doc_1"))
    assert clock.slept == [1.0, 2.0, 4.0]


def test_the_wait_ends_at_its_timeout_although_heartbeats_go_on(wire, script, make_client, clock):
    def heartbeats():
        yield _progress(wire, 5)
        while True:
            clock.now += 5.0
            yield b": heartbeat\n\n"

    service = script(wire.stream(heartbeats()))
    with pytest.raises(errors.DeadlineExceededError, match=r"within 60 s.*5 of 10 tokens"):
        make_client(service).wait_until_ready("doc_1", timeout_s=60.0)
    assert clock.now == 1060.0


def test_the_wait_ends_at_its_timeout_although_events_go_on(wire, script, make_client, clock):
    def events():
        while True:
            clock.now += 5.0
            yield _progress(wire, 5)

    with pytest.raises(errors.DeadlineExceededError):
        make_client(script(wire.stream(events()))).wait_until_ready("doc_1", timeout_s=60.0)
    assert clock.now == 1060.0


def test_no_silence_is_borne_longer_than_the_time_left(wire, script, make_client):
    service = script(wire.stream([_progress(wire, 10, "ready")]))
    make_client(service).wait_until_ready("doc_1", timeout_s=3.0)
    assert service.requests[0].extensions["timeout"]["read"] == 3.0


def test_ready_at_the_last_moment_is_ready(wire, script, make_client, clock):
    def late():
        clock.now += 100.0
        yield _progress(wire, 10, "ready")

    client = make_client(script(wire.stream(late())))
    assert client.wait_until_ready("doc_1", timeout_s=60.0).status == "ready"


@pytest.mark.parametrize(
    ("code", "expected"),
    [("document_too_large", errors.DocumentTooLargeError), ("new_code", errors.OrthrosError)],
)
def test_a_failed_ingestion_raises_the_class_of_its_code(wire, script, make_client, code, expected):
    client = make_client(script(wire.stream([_failed(wire, code, "It is too long.")])))
    with pytest.raises(expected, match="It is too long") as caught:
        client.wait_until_ready("doc_1")
    assert type(caught.value) is expected
    assert caught.value.code == code


def test_events_end_with_a_failed_document_instead_of_raising(wire, script, make_client):
    client = make_client(script(wire.stream([_failed(wire, "engine_error", "No.")])))
    assert [event.status for event in client.events("doc_1")] == ["failed"]


def test_an_unknown_document_is_told_at_once(wire, script, make_client):
    with pytest.raises(errors.NotFoundError):
        list(make_client(script(wire.refusal("not_found", 404))).events("doc_x"))


def test_an_error_event_ends_the_wait(wire, script, make_client):
    stream = wire.stream([wire.event("error", wire.problem("not_found", 404))])
    with pytest.raises(errors.NotFoundError):
        make_client(script(stream)).wait_until_ready("doc_1")


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_refused(script, make_client, timeout_s):
    with pytest.raises(errors.InvalidValueError, match="timeout_s"):
        make_client(script()).wait_until_ready("doc_1", timeout_s=timeout_s)


async def test_the_async_wait_behaves_alike(wire, script, make_async_client, clock):
    def breaking():
        yield _progress(wire, 3)
        raise httpx.ReadError("reset")

    def heartbeats():
        yield _progress(wire, 5)
        while True:
            clock.now += 5.0
            yield b": heartbeat\n\n"

    service = script(
        wire.stream(breaking()),
        wire.stream([_progress(wire, 10, "ready")]),
        wire.stream(heartbeats()),
    )
    seen = []
    async with make_async_client(service) as client:
        document = await client.wait_until_ready("doc_1", on_progress=seen.append)
        assert document.status == "ready"
        assert [event.prefill.tokens_done for event in seen] == [3, 10]
        with pytest.raises(errors.DeadlineExceededError):
            await client.wait_until_ready("doc_1", timeout_s=20.0)
