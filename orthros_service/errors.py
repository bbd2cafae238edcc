"""The errors of the service: one root, one stable code per kind.

Each error says what was wrong, what is allowed and what to do. `code` is part of the public API:
clients match on it, so a code is never renamed.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

JsonScalar = str | int | float | bool | None


def _rebuild(
    cls: type["OrthrosError"], message: str, phase: str | None, details: dict[str, Any]
) -> "OrthrosError":
    return cls(message, phase=phase, **details)


def validator_reason(message: str) -> str:
    """What a validator said, without pydantic's mark for those that are our own."""
    return message.removeprefix("Value error, ")


def validation_summary(details: Iterable[Mapping[str, Any]]) -> str:
    """Pydantic's errors as one line: place and reason of each."""
    reasons = []
    for each in details:
        place, reason = ".".join(map(str, each["loc"])), validator_reason(each["msg"])
        reasons.append(f"{place}: {reason}" if place else reason)
    return "; ".join(reasons)


class OrthrosError(Exception):
    """Root of every error that a caller can receive.

    Args:
        message: One sentence for a human: what was wrong, what is allowed, what to do.
        phase: Where it happened: "queue", "prefill", "handoff", "decode", "batch"; None before any
            of them.
        details: Small JSON scalars, such as `limit` and `actual`, that become members of the
            problem document.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    is_retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, phase: str | None = None, **details: JsonScalar) -> None:
        super().__init__(message)
        self.message = message
        self.phase = phase
        self.details: dict[str, JsonScalar] = details

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.phase, self.details)


class MalformedRequestError(OrthrosError):
    """The bytes of the request cannot be read: not UTF-8, not JSON, a repeated key."""

    code = "malformed_request"
    status = 400


class InvalidValueError(OrthrosError):
    """A field was read and has a value that is not allowed."""

    code = "invalid_value"
    status = 422


class EmptyDocumentError(InvalidValueError):
    """The document holds no text, or only white space."""

    code = "empty_document"


class InvalidTextError(InvalidValueError):
    """The text holds NUL characters or lone surrogates."""

    code = "invalid_text"


class NotFoundError(OrthrosError):
    """No such document, job or model."""

    code = "not_found"
    status = 404


class DocumentNotReadyError(OrthrosError):
    """The document is still being ingested, or its ingestion failed."""

    code = "document_not_ready"
    status = 409
    is_retryable = True


class ContextTooLongError(OrthrosError):
    """Question, history and answer do not fit; `limit` and `actual` are tokens."""

    code = "context_length_exceeded"
    status = 413


class DocumentTooLargeError(OrthrosError):
    """The document is over the byte or token limit; `limit` and `actual` say which."""

    code = "document_too_large"
    status = 413


class DocumentCorruptedError(OrthrosError):
    """The stored text of a document is not what was uploaded: delete it and upload it again."""

    code = "document_corrupted"


class UnsupportedDocumentError(OrthrosError):
    """The content type is not one that the service reads."""

    code = "unsupported_document"
    status = 415


class OverloadedError(OrthrosError):
    """Admission refused the work; `retry_after_s` says when to come back."""

    code = "overloaded"
    status = 429
    is_retryable = True


class DeadlineExceededError(OrthrosError):
    """The request's deadline passed before it was done."""

    code = "deadline_exceeded"
    status = 504
    is_retryable = True


class CancelledError(OrthrosError):
    """The caller left or revoked the request; the work was stopped."""

    code = "cancelled"
    status = 499


class UnavailableError(OrthrosError):
    """A worker died or cannot be reached; the request may be sent again."""

    code = "unavailable"
    status = 503
    is_retryable = True


class ModelError(OrthrosError):
    """A model directory is missing, incomplete or of an unsupported kind."""

    code = "model_error"


class StateError(OrthrosError):
    """A stored attention state cannot be used."""

    code = "state_error"


class StateMismatchError(StateError):
    """A state was made by another model, tokenizer, dtype or format version: prefill again."""

    code = "state_mismatch"


class StateCorruptedError(StateError):
    """The bytes of a state do not match their checksum: prefill the document again."""

    code = "state_corrupted"


class EngineError(OrthrosError):
    """The engine failed on this request; others go on."""

    code = "engine_error"
