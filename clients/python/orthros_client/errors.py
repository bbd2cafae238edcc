"""What can go wrong, as one family of exceptions.

The service sends a stable `code` with every error; the class of the same name as in the service is
raised for it. `ConnectionFailedError`, `ResponseTimeoutError`, `StreamBrokenError` and
`UnexpectedResponseError` are the client's own: no answer of the service stands behind them.
"""

from typing import ClassVar

from orthros_client.types import Problem


class OrthrosError(Exception):
    """Root of every error that the client raises, and the class of codes that it does not know.

    Args:
        message: One sentence for a human: what was wrong, what is allowed, what to do.
        code: Stable code; None takes that of the class.
        status: HTTP status of the answer, or None where none came or the client itself refused.
        problem: The service's problem document, with further members such as `limit` and `actual`.
        request_id: Names the request in the service's logs.
        is_retryable: Whether the same request may succeed later.
        retry_after_s: Seconds that the service asks to wait.
    """

    default_code: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        problem: Problem | None = None,
        request_id: str | None = None,
        is_retryable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else code
        self.status = status
        self.problem = problem
        self.request_id = request_id
        self.is_retryable = is_retryable
        self.retry_after_s = retry_after_s

    @property
    def phase(self) -> str | None:
        """Where in the service it happened, such as "prefill" or "decode"."""
        return None if self.problem is None else self.problem.phase


class MalformedRequestError(OrthrosError):
    """The bytes of the request or of the document cannot be read, for example not UTF-8."""

    default_code = "malformed_request"


class InvalidValueError(OrthrosError):
    """An argument has a value that is not allowed; the message names it."""

    default_code = "invalid_value"


class EmptyDocumentError(InvalidValueError):
    """The document holds no text, or only white space."""

    default_code = "empty_document"


class InvalidTextError(InvalidValueError):
    """A text holds NUL characters or lone surrogates."""

    default_code = "invalid_text"


class NotFoundError(OrthrosError):
    """No such document, job or model."""

    default_code = "not_found"


class DocumentNotReadyError(OrthrosError):
    """The document is still being ingested, or its ingestion failed."""

    default_code = "document_not_ready"


class ContextTooLongError(OrthrosError):
    """Question, history and answer do not fit into the model's context."""

    default_code = "context_length_exceeded"


class DocumentTooLargeError(OrthrosError):
    """The document is over the service's byte or token limit."""

    default_code = "document_too_large"


class UnsupportedDocumentError(OrthrosError):
    """The content type is not one that the service reads."""

    default_code = "unsupported_document"


class OverloadedError(OrthrosError):
    """The service has no room for the work now; `retry_after_s` says when to come back."""

    default_code = "overloaded"


class DeadlineExceededError(OrthrosError):
    """The deadline of a request, or of a wait in the client, passed before the work was done."""

    default_code = "deadline_exceeded"


class CancelledError(OrthrosError):
    """The request was revoked and its work stopped."""

    default_code = "cancelled"


class UnavailableError(OrthrosError):
    """A worker died or cannot be reached; the request may be sent again."""

    default_code = "unavailable"


class ModelError(OrthrosError):
    """The service's model is missing, incomplete or of an unsupported kind."""

    default_code = "model_error"


class StateError(OrthrosError):
    """A stored attention state cannot be used."""

    default_code = "state_error"


class StateMismatchError(StateError):
    """A state was made by another model, tokenizer, dtype or format version."""

    default_code = "state_mismatch"


class StateCorruptedError(StateError):
    """The bytes of a state do not match their checksum."""

    default_code = "state_corrupted"


class DocumentCorruptedError(OrthrosError):
    """The stored text of a document is not what was uploaded: delete it and upload it again."""

    default_code = "document_corrupted"


class EngineError(OrthrosError):
    """The engine failed on this request; others go on."""

    default_code = "engine_error"


class ConnectionFailedError(OrthrosError):
    """No connection, or it broke before the answer was complete.

    Args:
        message: See `OrthrosError`.
        was_sent: Whether the service may have received the request.
    """

    default_code = "connection_failed"

    def __init__(self, message: str, *, was_sent: bool = False) -> None:
        super().__init__(message, is_retryable=True)
        self.was_sent = was_sent


class ResponseTimeoutError(OrthrosError):
    """The service accepted the connection and then sent nothing for too long."""

    default_code = "response_timeout"


class StreamBrokenError(OrthrosError):
    """A stream ended without its `completed` event, so the text that arrived is not an answer.

    Args:
        message: See `OrthrosError`.
        partial_text: What had arrived until then.
    """

    default_code = "stream_broken"

    def __init__(self, message: str, *, partial_text: str = "") -> None:
        super().__init__(message)
        self.partial_text = partial_text


class UnexpectedResponseError(OrthrosError):
    """The answer is not one of an Orthros service: a wrong base URL, or a proxy's own page."""

    default_code = "unexpected_response"
