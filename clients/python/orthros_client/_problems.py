"""From answers and httpx exceptions to our errors; the one place where either is mapped."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
from pydantic import BaseModel, ValidationError

from orthros_client import errors
from orthros_client.errors import OrthrosError
from orthros_client.types import Problem

EXCERPT_CHARS = 200

_LOCAL_ERRORS = (
    errors.ConnectionFailedError,
    errors.ResponseTimeoutError,
    errors.StreamBrokenError,
    errors.UnexpectedResponseError,
)


def _subclasses(root: type[OrthrosError]) -> Iterator[type[OrthrosError]]:
    for cls in root.__subclasses__():
        yield cls
        yield from _subclasses(cls)


ERRORS_BY_CODE: Mapping[str, type[OrthrosError]] = {
    cls.default_code: cls for cls in _subclasses(OrthrosError) if cls not in _LOCAL_ERRORS
}

# Proxies, and Ray Serve itself, answer these and other 5xx without a problem document: the service
# behind them stops, starts or has died.
_ERRORS_BY_STATUS: Mapping[int, type[OrthrosError]] = {
    404: errors.UnavailableError,
    413: errors.DocumentTooLargeError,
    429: errors.OverloadedError,
    504: errors.DeadlineExceededError,
}
_CHECK_URL = " Check that the base URL is that of the service."
_HINTS: Mapping[type[OrthrosError], str] = {
    errors.UnavailableError: " The service may be starting or stopping; send the request again.",
    errors.UnexpectedResponseError: _CHECK_URL,
}
# Refused before any work began, so that sending again repeats nothing.
_REFUSED_STATUSES = frozenset({429, 503})


class _OpenAIError(BaseModel):
    message: str
    code: str
    request_id: str | None = None


class _OpenAIBody(BaseModel):
    error: _OpenAIError


def error_from_code(code: str, message: str) -> OrthrosError:
    """The error of a code that came without a problem document, as in a failed document."""
    return ERRORS_BY_CODE.get(code, OrthrosError)(message, code=code)


def error_from_problem(
    problem: Problem, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> OrthrosError:
    """The error that a problem document describes; a code we do not know gives the root class."""
    headers = {} if headers is None else headers
    return ERRORS_BY_CODE.get(problem.code, OrthrosError)(
        _message(problem),
        code=problem.code,
        status=problem.status if status is None else status,
        problem=problem,
        request_id=problem.request_id or headers.get("x-request-id"),
        is_retryable=problem.retryable,
        retry_after_s=_longest(retry_after_s(headers), problem.retry_after_s),
    )


def error_from_response(status: int, headers: Mapping[str, str], body: bytes) -> OrthrosError:
    """The error of an answer that is not a success."""
    with suppress(ValidationError):
        return error_from_problem(Problem.model_validate_json(body), status=status, headers=headers)
    with suppress(ValidationError):
        return _error_from_openai_shape(
            status, headers, _OpenAIBody.model_validate_json(body).error
        )
    return _error_from_foreign_answer(status, headers, body)


def error_from_event(data: str) -> OrthrosError:
    """The error of a stream's `error` event."""
    try:
        return error_from_problem(Problem.model_validate_json(data))
    except ValidationError:
        return OrthrosError("The service ended the stream with an error that cannot be read.")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header, given as seconds or as a date; None where it is unusable."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        zoned = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
        return max(0.0, (zoned - datetime.now(UTC)).total_seconds())
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def invalid_arguments(error: ValidationError) -> OrthrosError:
    """The error of arguments that the wire types refuse; it never repeats a given value."""
    entries = error.errors(include_input=False, include_url=False, include_context=False)
    parts = []
    for entry in entries:
        where = ".".join(str(part) for part in entry["loc"])
        reason = entry["msg"].removeprefix("Value error, ")
        parts.append(f"{where}: {reason}" if where else reason)
    is_text = all(entry["type"] == "string_unicode" for entry in entries)
    cls = errors.InvalidTextError if is_text else errors.InvalidValueError
    return cls(f"The request was not sent: {'; '.join(parts)}.")


@contextmanager
def httpx_errors_mapped(url: str) -> Iterator[None]:
    """Turn what httpx raises inside the block into our errors.

    Raises:
        ConnectionFailedError: No connection, or it broke; `was_sent` tells the two apart.
        ResponseTimeoutError: The service kept silent for longer than the timeout.
        UnexpectedResponseError: The bytes are not HTTP, or not in the encoding that they claim.
    """
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise errors.ConnectionFailedError(
            f"Cannot connect to {url} ({_reason(error)}). Check the address and that the service "
            "runs there."
        ) from error
    except httpx.TimeoutException as error:
        raise errors.ResponseTimeoutError(
            f"{url} did not answer in time ({type(error).__name__}). Raise read_timeout_s, or look "
            "whether the service is overloaded."
        ) from error
    except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError) as error:
        raise errors.ConnectionFailedError(
            f"The connection to {url} broke ({_reason(error)}). The request may have arrived.",
            was_sent=True,
        ) from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise errors.UnexpectedResponseError(
            f"The answer of {url} cannot be read ({_reason(error)})."
        ) from error


def _message(problem: Problem) -> str:
    if not problem.errors:
        return problem.detail
    fields = [f"{entry.get('field')}: {entry.get('message')}" for entry in problem.errors]
    unsaid = [field for field in fields if field not in problem.detail]
    return " ".join([problem.detail, *([f"({'; '.join(unsaid)})"] if unsaid else [])])


def _error_from_openai_shape(
    status: int, headers: Mapping[str, str], error: _OpenAIError
) -> OrthrosError:
    # The service's paths that OpenAI's clients use too, such as /v1/models, answer in that shape.
    return ERRORS_BY_CODE.get(error.code, OrthrosError)(
        error.message,
        code=error.code,
        status=status,
        request_id=error.request_id or headers.get("x-request-id"),
        is_retryable=status in _REFUSED_STATUSES,
        retry_after_s=retry_after_s(headers),
    )


def _error_from_foreign_answer(
    status: int, headers: Mapping[str, str], body: bytes
) -> OrthrosError:
    excerpt = " ".join(body[: 4 * EXCERPT_CHARS].decode("utf-8", "replace").split())[:EXCERPT_CHARS]
    other = errors.UnavailableError if status >= 500 else errors.UnexpectedResponseError
    cls = _ERRORS_BY_STATUS.get(status, other)
    said = f": {excerpt.removesuffix('.')}" if excerpt else ", without a body"
    hint = _HINTS.get(cls, "") + (_CHECK_URL if status == 404 else "")
    return cls(
        f"HTTP {status} without a problem document{said}.{hint}",
        status=status,
        request_id=headers.get("x-request-id"),
        is_retryable=cls is errors.UnavailableError or status in _REFUSED_STATUSES,
        retry_after_s=retry_after_s(headers),
    )


def _longest(*waits: float | None) -> float | None:
    given = [wait for wait in waits if wait is not None]
    return max(given) if given else None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
