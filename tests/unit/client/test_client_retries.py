"""What is sent again, after how long, and what never is."""

import httpx
import pytest

from orthros_client import errors


def test_retry_after_is_honoured_and_the_second_attempt_succeeds(wire, script, make_client, clock):
    service = script(
        wire.refusal("overloaded", 429, headers={"Retry-After": "7"}, retryable=True),
        httpx.Response(200, json=wire.answer()),
    )
    assert make_client(service).ask("Who?", document_ids=["doc_1"]).text == "Ishmael."
    assert clock.slept == [7.0]
    assert service.requests[0].content == service.requests[1].content


def test_waits_double_without_retry_after(wire, script, make_client, clock):
    service = script(*(wire.refusal("unavailable", 503, retryable=True) for _ in range(6)))
    with pytest.raises(errors.UnavailableError):
        make_client(service, max_retries=5, max_retry_s=100.0).models()
    assert clock.slept == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_a_wait_of_our_own_is_spread_by_jitter(clock, wire):
    from orthros_client._retries import RetryPolicy

    policy = RetryPolicy()
    assert policy.backoff_s(3, 0.0) == 2.0
    assert policy.backoff_s(3, 0.5) == 3.0
    assert policy.backoff_s(10_000, 0.999) <= policy.max_delay_s


def test_a_retry_after_beyond_the_time_left_is_not_waited_for(wire, script, make_client, clock):
    service = script(wire.refusal("overloaded", 429, retryable=True, retry_after_s=61))
    with pytest.raises(errors.OverloadedError) as caught:
        make_client(service, max_retry_s=60.0).count_tokens("text")
    assert caught.value.retry_after_s == 61
    assert clock.slept == []


def test_the_requests_own_deadline_bounds_its_retries(wire, script, make_client, clock):
    service = script(
        wire.refusal("overloaded", 429, retryable=True, retry_after_s=6),
        wire.refusal("overloaded", 429, retryable=True, retry_after_s=6),
    )
    with pytest.raises(errors.OverloadedError):
        make_client(service).ask("Who?", document_ids=["doc_1"], deadline_s=10.0)
    assert clock.slept == [6.0]


def test_max_retries_zero_sends_once(wire, script, make_client, clock):
    service = script(wire.refusal("overloaded", 429, retryable=True))
    with pytest.raises(errors.OverloadedError):
        make_client(service, max_retries=0).models()
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_value", 422),
        ("not_found", 404),
        ("engine_error", 500),
        ("document_not_ready", 409),
    ],
)
def test_other_refusals_are_final(wire, script, make_client, code, status):
    service = script(wire.refusal(code, status, retryable=status == 409))
    with pytest.raises(errors.OrthrosError) as caught:
        make_client(service).documents.get("doc_1")
    assert caught.value.code == code
    assert len(service.requests) == 1


def test_the_service_may_say_that_a_503_is_final(wire, script, make_client):
    service = script(wire.refusal("unavailable", 503, retryable=False))
    with pytest.raises(errors.UnavailableError):
        make_client(service).models()


def test_a_refused_connection_is_tried_again_for_every_kind_of_request(
    wire, script, make_client, clock
):
    service = script(
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.Response(201, json=wire.document("queued")),
    )
    assert make_client(service).upload("Some text").id == "doc_1"
    assert clock.slept == [0.5, 1.0]


@pytest.mark.parametrize("failure", [httpx.ReadError("reset"), httpx.ReadTimeout("silent")])
def test_a_request_with_effects_is_not_repeated_after_it_may_have_arrived(
    wire, script, make_client, failure
):
    for call in (
        lambda client: client.upload("Some text"),
        lambda client: client.ask("Who?", document_ids=["doc_1"]),
        lambda client: client.documents.delete("doc_1"),
    ):
        service = script(failure)
        with pytest.raises((errors.ConnectionFailedError, errors.ResponseTimeoutError)):
            call(make_client(service))
        assert len(service.requests) == 1


def test_a_request_without_effects_is_repeated_after_a_lost_answer(wire, script, make_client):
    count = {"num_tokens": 2, "document_tokens": 30, "num_chars": 4, "prefill_mode": "full"}
    service = script(
        httpx.RemoteProtocolError("cut"),
        httpx.Response(502, text="Bad gateway"),
        httpx.Response(200, json=count),
    )
    assert make_client(service).count_tokens("text").num_tokens == 2


def test_a_proxys_404_is_tried_again_for_every_kind_of_request(wire, script, make_client):
    service = script(
        httpx.Response(404, text="Path '/v1/documents' not found. Ping http://.../-/routes"),
        httpx.Response(201, json=wire.document("queued")),
    )
    assert make_client(service).upload("Some text").id == "doc_1"


def test_a_proxys_500_is_tried_again_only_where_that_repeats_nothing(wire, script, make_client):
    lost = httpx.Response(500, text="Internal Server Error")
    service = script(lost, httpx.Response(200, json=wire.document("ready")))
    assert make_client(service).documents.get("doc_1").status == "ready"
    service = script(lost)
    with pytest.raises(errors.UnavailableError) as caught:
        make_client(service).upload("Some text")
    assert caught.value.is_retryable
    assert len(service.requests) == 1


def test_a_500_of_the_service_itself_is_final_on_every_path(script, make_client):
    body = {"error": {"message": "Failed.", "type": "server_error", "code": "internal"}}
    service = script(httpx.Response(500, json=body))
    with pytest.raises(errors.OrthrosError, match="Failed"):
        make_client(service).models()
    assert len(service.requests) == 1


def test_a_proxys_504_is_final_for_a_request_with_effects(script, make_client):
    service = script(httpx.Response(504, text="Gateway timeout"))
    with pytest.raises(errors.DeadlineExceededError):
        make_client(service).upload("Some text")


def test_a_probe_is_a_single_attempt(script, make_client, wire):
    assert make_client(script(wire.refusal("unavailable", 503, retryable=True))).readyz() is False
    assert make_client(script(httpx.Response(200, json={}))).readyz() is True
    assert make_client(script(httpx.Response(200, json={}))).healthz() is True
    with pytest.raises(errors.ConnectionFailedError):
        make_client(script(httpx.ConnectError("refused"))).healthz()
    with pytest.raises(errors.UnexpectedResponseError):
        make_client(script(httpx.Response(405, text="Not allowed"))).healthz()
    with pytest.raises(errors.UnavailableError):
        make_client(script(httpx.Response(404, text="Not found"))).healthz()


async def test_the_async_client_retries_by_the_same_rules(wire, script, make_async_client, clock):
    service = script(
        httpx.ConnectError("refused"),
        wire.refusal("overloaded", 429, headers={"Retry-After": "7"}, retryable=True),
        httpx.Response(200, json=wire.answer()),
        httpx.ReadError("reset"),
    )
    async with make_async_client(service) as client:
        assert (await client.ask("Who?", document_ids=["doc_1"])).text == "Ishmael."
        assert clock.slept == [0.5, 7.0]
        with pytest.raises(errors.ConnectionFailedError):
            await client.ask("Who?", document_ids=["doc_1"])
    assert len(service.requests) == 4


@pytest.mark.parametrize("policy", [{"max_retries": -1}, {"max_retry_s": float("nan")}])
def test_bounds_that_bound_nothing_are_refused(script, make_client, policy):
    with pytest.raises(errors.InvalidValueError, match=next(iter(policy))):
        make_client(script(), **policy)
