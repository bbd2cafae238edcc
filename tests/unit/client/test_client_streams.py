"""Streamed answers: text at once, and nothing that looks whole when it is not."""

import httpx
import pytest

from orthros_client import errors


def _two_deltas(wire):
    return [wire.event("delta", {"text": "Ish"}), wire.event("delta", {"text": "mael."})]


def test_deltas_arrive_before_the_answer_ends(wire, script, make_client):
    seen: list[str] = []

    def chunks():
        yield wire.event("delta", {"text": "Ish"})
        # The first delta must have been handed out before the service goes on.
        assert seen == ["Ish"]
        yield wire.event("delta", {"text": "mael."})
        assert seen == ["Ish", "mael."]
        yield wire.event("completed", wire.answer())

    client = make_client(script(wire.stream(chunks())))
    with client.ask_stream("Who?", document_ids=["doc_1"]) as stream:
        # One by one: the service looks at what has been seen.
        for delta in stream:
            seen.append(delta.text)  # noqa: PERF401
    assert seen == ["Ish", "mael."]
    assert stream.text == stream.answer.text == "Ishmael."


def test_nothing_is_read_after_the_completed_event(wire, script, make_client):
    def chunks():
        yield wire.event("completed", wire.answer())
        raise AssertionError("read on after the end")

    with make_client(script(wire.stream(chunks()))).summarize_stream(text="Long.") as stream:
        assert list(stream) == []
    assert stream.answer.id == "ans_1"


def test_a_stream_that_ends_without_its_completed_event_is_broken(wire, script, make_client):
    service = script(wire.stream(_two_deltas(wire)))
    received = []
    with make_client(service).ask_stream("Who?", document_ids=["doc_1"]) as stream:
        with pytest.raises(errors.StreamBrokenError) as caught:
            received.extend(delta.text for delta in stream)
        assert caught.value.partial_text == "Ishmael."
        with pytest.raises(errors.StreamBrokenError):
            _ = stream.answer
    assert len(service.requests) == 1


def test_a_connection_that_breaks_in_a_stream_is_never_retried(wire, script, make_client, clock):
    def chunks():
        yield from _two_deltas(wire)
        raise httpx.ReadError("reset")

    service = script(wire.stream(chunks()))
    with (
        make_client(service).ask_stream("Who?", document_ids=["doc_1"]) as stream,
        pytest.raises(errors.StreamBrokenError, match="reset") as caught,
    ):
        list(stream)
    assert isinstance(caught.value.__cause__, errors.ConnectionFailedError)
    assert (len(service.requests), clock.slept) == (1, [])


def test_half_an_event_is_not_an_answer(wire, script, make_client):
    completed = wire.event("completed", wire.answer())
    for cut in (len(completed) - 1, len(completed) // 2):
        service = script(wire.stream([completed[:cut]]))
        with (
            make_client(service).ask_stream("Who?", text="Text.") as stream,
            pytest.raises(errors.StreamBrokenError),
        ):
            list(stream)


def test_an_error_event_raises_its_class_after_the_text_before_it(wire, script, make_client):
    problem = wire.problem("engine_error", 500, phase="decode")
    chunk = b"".join([*_two_deltas(wire), wire.event("error", problem)])
    received = []
    with (
        make_client(script(wire.stream([chunk]))).ask_stream("Who?", text="Text.") as stream,
        pytest.raises(errors.EngineError) as caught,
    ):
        received.extend(delta.text for delta in stream)
    assert received == ["Ish", "mael."]
    assert (caught.value.phase, caught.value.request_id) == ("decode", "req_1")


def test_an_error_event_that_cannot_be_read_is_still_an_error(wire, script, make_client):
    service = script(wire.stream([b"event: error\ndata: not json\n\n"]))
    with make_client(service).ask_stream("Who?", text="Text.") as stream:
        with pytest.raises(errors.OrthrosError) as caught:
            list(stream)
        assert type(caught.value) is errors.OrthrosError


def test_unknown_events_and_heartbeats_are_passed_over(wire, script, make_client):
    chunks = [
        b": heartbeat\n\n",
        wire.event("started", {"anything": 1}),
        *_two_deltas(wire),
        b": heartbeat\n\n",
        wire.event("completed", wire.answer()),
    ]
    with make_client(script(wire.stream(chunks))).ask_stream("Who?", text="Text.") as stream:
        assert "".join(delta.text for delta in stream) == "Ishmael."


def test_an_event_of_the_wrong_form_is_reported(wire, script, make_client):
    service = script(wire.stream([wire.event("completed", {"id": "ans_1"})]))
    with (
        make_client(service).ask_stream("Who?", text="Text.") as stream,
        pytest.raises(errors.UnexpectedResponseError, match="Answer"),
    ):
        list(stream)


def test_a_refused_stream_is_tried_again_because_it_has_not_begun(wire, script, make_client, clock):
    service = script(
        wire.refusal("overloaded", 429, retryable=True, retry_after_s=4),
        wire.stream([wire.event("completed", wire.answer())]),
    )
    with make_client(service).ask_stream("Who?", text="Text.") as stream:
        list(stream)
    assert clock.slept == [4]
    assert service.body["stream"] is True
    assert service.requests[0].headers["Accept"] == "text/event-stream"


def test_a_refused_stream_raises_the_services_error(wire, script, make_client):
    service = script(wire.refusal("not_found", 404))
    with (
        make_client(service).ask_stream("Who?", document_ids=["doc_x"]) as stream,
        pytest.raises(errors.NotFoundError),
    ):
        list(stream)


def test_a_success_that_is_no_stream_is_reported(wire, script, make_client):
    service = script(httpx.Response(200, json=wire.answer()))
    with (
        make_client(service).ask_stream("Who?", text="Text.") as stream,
        pytest.raises(errors.UnexpectedResponseError, match="event stream"),
    ):
        list(stream)


def test_leaving_early_closes_the_connection(wire, script, make_client):
    response = wire.stream([*_two_deltas(wire), wire.event("completed", wire.answer())])
    with make_client(script(response)).ask_stream("Who?", text="Text.") as stream:
        next(stream)
        assert not response.is_closed
    assert response.is_closed
    with pytest.raises(errors.StreamBrokenError, match="not read to its end"):
        _ = stream.answer


async def test_the_async_stream_behaves_alike(wire, script, make_async_client):
    whole = wire.stream([*_two_deltas(wire), wire.event("completed", wire.answer())])
    broken = wire.stream(_two_deltas(wire))
    left = wire.stream([*_two_deltas(wire), wire.event("completed", wire.answer())])
    async with make_async_client(script(whole, broken, left)) as client:
        async with client.ask_stream("Who?", text="Text.") as stream:
            assert [delta.text async for delta in stream] == ["Ish", "mael."]
        assert stream.answer.text == "Ishmael."
        async with client.summarize_stream(text="Text.") as stream:
            with pytest.raises(errors.StreamBrokenError) as caught:
                [delta async for delta in stream]
        assert caught.value.partial_text == "Ishmael."
        async with client.ask_stream("Who?", text="Text.") as stream:
            await anext(stream)
        assert left.is_closed
