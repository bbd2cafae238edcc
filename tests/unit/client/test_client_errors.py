"""Problems of the service and failures of the connection arrive as the right classes."""

import json
import pickle
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest

import orthros_client
from orthros_client import errors
from orthros_client._problems import error_from_response, httpx_errors_mapped, retry_after_s
from orthros_client.types import Problem


def _response_error(body: object, status: int = 400, **headers: str) -> errors.OrthrosError:
    return error_from_response(status, httpx.Headers(headers), json.dumps(body).encode())


def test_a_problem_keeps_all_that_the_service_said(wire):
    problem = wire.problem(
        "context_length_exceeded", 413, phase="queue", limit=8192, actual=9000, retryable=False
    )
    error = _response_error(problem, 413)
    assert type(error) is errors.ContextTooLongError
    assert (error.status, error.code, error.request_id) == (413, "context_length_exceeded", "req_1")
    assert error.phase == "queue"
    assert error.problem is not None
    assert error.problem.model_extra == {"limit": 8192, "actual": 9000}
    assert str(error) == "What was wrong with context_length_exceeded."


def test_a_code_that_the_client_does_not_know_gives_the_root_class(wire):
    error = _response_error(wire.problem("teapot", 418, retryable=True), 418)
    assert type(error) is errors.OrthrosError
    assert (error.code, error.status, error.is_retryable) == ("teapot", 418, True)


@pytest.mark.parametrize("code", ["connection_failed", "stream_broken", "response_timeout"])
def test_a_service_cannot_raise_the_clients_own_errors(wire, code):
    assert type(_response_error(wire.problem(code, 500), 500)) is errors.OrthrosError


def test_wrong_fields_are_named_once(wire):
    fields = [{"field": "top_p", "message": "too large"}, {"field": "seed", "message": "no"}]
    problem = wire.problem("invalid_value", 422, detail="Wrong: seed: no.", errors=fields)
    assert str(_response_error(problem, 422)) == "Wrong: seed: no. (top_p: too large)"


def test_openai_shaped_errors_keep_their_code():
    body = {"error": {"message": "No room.", "type": "rate_limit_error", "code": "overloaded"}}
    error = _response_error(body, 429, **{"Retry-After": "3", "X-Request-ID": "req_9"})
    assert type(error) is errors.OverloadedError
    assert (error.is_retryable, error.retry_after_s, error.request_id) == (True, 3.0, "req_9")


@pytest.mark.parametrize(
    ("status", "expected", "is_retryable"),
    [
        (429, errors.OverloadedError, True),
        (503, errors.UnavailableError, True),
        (500, errors.UnavailableError, True),
        (502, errors.UnavailableError, True),
        (520, errors.UnavailableError, True),
        (504, errors.DeadlineExceededError, False),
        (413, errors.DocumentTooLargeError, False),
        (404, errors.UnavailableError, True),
        (405, errors.UnexpectedResponseError, False),
        (301, errors.UnexpectedResponseError, False),
    ],
)
def test_an_answer_without_a_problem_document_is_judged_by_its_status(
    status, expected, is_retryable
):
    error = error_from_response(status, httpx.Headers(), b"<h1>Nope</h1>\xff")
    assert type(error) is expected
    assert (error.status, error.is_retryable) == (status, is_retryable)
    assert "<h1>Nope</h1>" in str(error)


def test_a_404_of_a_proxy_says_that_the_service_may_be_starting_or_elsewhere():
    text = b"Path '/v1/models' not found. Ping http://.../-/routes for available routes."
    error = error_from_response(404, httpx.Headers(), text)
    assert "starting or stopping" in str(error)
    assert "base URL" in str(error)
    assert text.decode() in str(error)


def test_a_long_foreign_answer_is_cut():
    assert len(str(error_from_response(404, httpx.Headers(), b"x" * 100_000))) < 400


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3", 3.0), ("0", 0.0), ("1.5", 1.5), ("-1", None), ("nan", None), ("inf", None), ("x", None)],
)
def test_retry_after_in_seconds(value, expected):
    assert retry_after_s(httpx.Headers({"Retry-After": value})) == expected


def test_retry_after_as_a_date():
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 27 < (retry_after_s(httpx.Headers({"Retry-After": soon})) or 0) <= 30
    assert retry_after_s(httpx.Headers({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})) == 0.0


def test_the_longer_of_header_and_member_counts(wire):
    problem = wire.problem("overloaded", 429, retry_after_s=7.5)
    assert _response_error(problem, 429, **{"Retry-After": "3"}).retry_after_s == 7.5
    assert _response_error(problem, 429, **{"Retry-After": "9"}).retry_after_s == 9.0


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (httpx.ConnectError("refused"), errors.ConnectionFailedError),
        (httpx.ConnectTimeout("slow"), errors.ConnectionFailedError),
        (httpx.ReadError("reset"), errors.ConnectionFailedError),
        (httpx.WriteError("reset"), errors.ConnectionFailedError),
        (httpx.RemoteProtocolError("cut"), errors.ConnectionFailedError),
        (httpx.ReadTimeout("silent"), errors.ResponseTimeoutError),
        (httpx.WriteTimeout("silent"), errors.ResponseTimeoutError),
        (httpx.PoolTimeout("busy"), errors.ResponseTimeoutError),
        (httpx.DecodingError("not gzip"), errors.UnexpectedResponseError),
        (httpx.TooManyRedirects("loop"), errors.UnexpectedResponseError),
    ],
)
def test_httpx_errors_become_ours(raised, expected):
    with pytest.raises(expected) as caught, httpx_errors_mapped("http://host:1"):
        raise raised
    assert "http://host:1" in str(caught.value)
    assert caught.value.__cause__ is raised
    assert caught.value.status is None


def test_only_a_failed_connection_is_known_not_to_have_sent():
    for raised, was_sent in ((httpx.ConnectError("x"), False), (httpx.ReadError("x"), True)):
        with pytest.raises(errors.ConnectionFailedError) as caught, httpx_errors_mapped("u"):
            raise raised
        assert caught.value.was_sent is was_sent


def test_every_error_survives_pickling(wire):
    problem = Problem.model_validate(wire.problem("overloaded", 429))
    classes = [
        value
        for value in vars(orthros_client).values()
        if isinstance(value, type) and issubclass(value, errors.OrthrosError)
    ]
    assert len(classes) > 20
    for cls in classes:
        error = cls("It failed.")
        error.problem, error.request_id, error.retry_after_s = problem, "req_1", 2.0
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is cls
        assert str(copy) == "It failed."
        assert vars(copy) == vars(error)
