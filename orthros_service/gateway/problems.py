"""Errors as HTTP: RFC 9457 problem documents on native paths, OpenAI's shape on compatible ones.

Both carry the same `code`. No text of an unexpected exception and no value of a request is sent.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from orthros_client.types import Problem
from orthros_service.errors import (
    CancelledError,
    ContextTooLongError,
    DeadlineExceededError,
    InvalidValueError,
    NotFoundError,
    OrthrosError,
    UnavailableError,
    validator_reason,
)
from orthros_service.gateway.context import StoppingError
from orthros_service.gateway.lingering import LingeringResponse, has_unread_body
from orthros_service.gateway.request_state import RequestState
from orthros_service.telemetry import current_request_id

logger = logging.getLogger(__name__)

PROBLEM_JSON = "application/problem+json"
_MAX_FIELDS = 20
_MAX_FIELD_CHARS = 100
_TITLES = {
    "malformed_request": "The request cannot be read",
    "invalid_value": "A value is not allowed",
    "empty_document": "The document is empty",
    "invalid_text": "A text holds characters that are not allowed",
    "not_found": "Not found",
    "model_not_found": "Model not found",
    "method_not_allowed": "Method not allowed",
    "document_not_ready": "The document is not ready",
    "context_length_exceeded": "The context is too long",
    "document_too_large": "Too large",
    "unsupported_document": "Content type not supported",
    "overloaded": "Overloaded",
    "deadline_exceeded": "Deadline exceeded",
    "cancelled": "Cancelled",
    "unavailable": "Not available now",
}


class MethodNotAllowedError(OrthrosError):
    """The path exists and does not take this method."""

    code = "method_not_allowed"
    status = 405


class ModelNotFoundError(NotFoundError):
    """There is no such model here."""

    code = "model_not_found"


class InvalidFieldsError(InvalidValueError):
    """One or more fields of the request are not allowed.

    Args:
        message: One sentence.
        fields: What is wrong, field by field; never the values.
    """

    def __init__(self, message: str, *, fields: Sequence[Mapping[str, str]] = ()) -> None:
        super().__init__(message)
        self.fields = [dict(field) for field in fields]

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the fields when the error crosses a process."""
        return _rebuild_invalid_fields, (self.message, self.fields)


def _rebuild_invalid_fields(message: str, fields: list[dict[str, str]]) -> InvalidFieldsError:
    return InvalidFieldsError(message, fields=fields)


def invalid_field(field: str, message: str) -> InvalidFieldsError:
    """Return the error of one wrong field."""
    return InvalidFieldsError(
        f"The field {field} is not valid: {message}.",
        fields=[{"field": field, "message": message}],
    )


def invalid_fields(errors: Sequence[Mapping[str, Any]]) -> InvalidFieldsError:
    """Turn pydantic's errors into ours, without what was sent."""
    fields: list[Mapping[str, str]] = []
    for error in errors[:_MAX_FIELDS]:
        name = _field_name(error["loc"])
        fields.append({"field": name, "message": validator_reason(str(error["msg"]))})
    listed = "; ".join(f"{field['field']}: {field['message']}" for field in fields[:3])
    more = len(errors) - min(len(fields), 3)
    rest = f"; and {more} more" if more > 0 else ""
    return InvalidFieldsError(f"The request is not valid: {listed}{rest}.", fields=fields)


def _field_name(location: Sequence[object]) -> str:
    # FastAPI names the place first; pydantic adds the branch of a union, which ours write as <tag>.
    parts = [str(part) for part in location]
    inner = parts[1:] if parts[:1] in (["body"], ["query"], ["path"]) else parts
    names = [part for part in inner if not (part.startswith("<") and part.endswith(">"))]
    return ".".join(names)[:_MAX_FIELD_CHARS] or "body"


def is_openai_path(path: str) -> bool:
    """Return whether errors of this path have OpenAI's shape."""
    return path.startswith(("/v1/chat/", "/v1/models/")) or path == "/v1/models"


def title_of(code: str) -> str:
    """Return the short text that belongs to a code."""
    return _TITLES.get(code, HTTPStatus.INTERNAL_SERVER_ERROR.phrase)


def problem_of(error: OrthrosError) -> Problem:
    """Describe an error as a problem document."""
    details = dict(error.details)
    retry_after_s = details.pop("retry_after_s", None)
    return Problem(
        type=f"urn:orthros:problem:{error.code}",
        title=title_of(error.code),
        status=error.status,
        detail=error.message,
        code=error.code,
        phase=error.phase,
        retryable=error.is_retryable,
        retry_after_s=retry_after_s if isinstance(retry_after_s, int | float) else None,
        request_id=current_request_id(),
        errors=error.fields if isinstance(error, InvalidFieldsError) else None,
        **{name: value for name, value in details.items() if name not in Problem.model_fields},
    )


def problem_json(error: OrthrosError) -> dict[str, Any]:
    """Return the members of an error's problem document; those without a value are left out."""
    return problem_of(error).model_dump(exclude_none=True)


def openai_status(error: OrthrosError) -> int:
    """Return the HTTP status on compatible paths: whatever is wrong with a request is a 400."""
    return 400 if isinstance(error, ContextTooLongError | InvalidValueError) else error.status


def openai_json(error: OrthrosError) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    fields = error.fields if isinstance(error, InvalidFieldsError) else []
    details = {name: value for name, value in error.details.items() if value is not None}
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": fields[0]["field"] if fields else None,
            "code": error.code,
            **({"phase": error.phase} if error.phase else {}),
            **({"details": details} if details else {}),
            "request_id": current_request_id(),
        }
    }


def error_response(request: Request, error: OrthrosError) -> Response:
    """Render an error for the path that was asked, and note it for the metrics."""
    RequestState.of(request.scope).error_code = error.code
    is_openai = is_openai_path(request.url.path)
    headers: dict[str, str] = {}
    retry_after_s = error.details.get("retry_after_s")
    if error.is_retryable and isinstance(retry_after_s, int | float):
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    allow = error.details.get("allow")
    if isinstance(error, MethodNotAllowedError) and isinstance(allow, str):
        headers["Allow"] = allow
    response_class = LingeringResponse if has_unread_body(request) else Response
    return response_class(
        json.dumps(openai_json(error) if is_openai else problem_json(error)),
        status_code=openai_status(error) if is_openai else error.status,
        media_type="application/json" if is_openai else PROBLEM_JSON,
        headers=headers,
    )


def log_failure(error: OrthrosError, *, what: str, cause: Exception | None = None) -> None:
    """Log an error that was not the caller's fault; a deadline that passed is nobody's.

    Args:
        error: What the caller is told.
        what: What failed, such as "request".
        cause: What was raised, if not the error itself.
    """
    extra = {"phase": error.phase} if error.phase else {}
    if isinstance(error, (DeadlineExceededError, StoppingError)):
        logger.warning("%s failed: %s", what, error.code, extra=extra)
    else:
        logger.error("%s failed: %s", what, error.code, exc_info=cause or error, extra=extra)


def internal_error() -> OrthrosError:
    """Return the error that a caller sees for an exception that nobody expected."""
    return OrthrosError(
        "The service failed on this request; the request_id names it in the service's logs."
    )


def _from_http_exception(request: Request, error: HTTPException) -> OrthrosError:
    if error.status_code == 404:
        return NotFoundError("There is no such path; /openapi.json lists those that exist.")
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return MethodNotAllowedError(
            f"This path does not take {request.method}; it takes {allow or 'other methods'}.",
            allow=allow or None,
        )
    if error.status_code == 503:
        return UnavailableError("The service cannot take this request now; send it again.")
    logger.error("an unexpected HTTP exception with status %d", error.status_code)
    return internal_error()


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of the app end in `error_response`."""

    async def on_orthros(request: Request, error: Exception) -> Response:
        assert isinstance(error, OrthrosError)
        if error.status >= 500:
            log_failure(error, what="request")
        return error_response(request, error)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(request, invalid_fields(error.errors()))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(request, _from_http_exception(request, error))

    async def on_disconnect(request: Request, _error: Exception) -> Response:
        return error_response(request, CancelledError("The client left before its request ended."))

    app.add_exception_handler(OrthrosError, on_orthros)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
