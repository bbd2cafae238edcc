"""One HTTP request as a plain value: what is sent, how long to wait, and what comes back."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from orthros_client._problems import error_from_response
from orthros_client.errors import UnexpectedResponseError

# Answers that need no model must not hang as long as one that does.
QUICK_READ_TIMEOUT_S = 30.0

ResponseT = TypeVar("ResponseT", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest(Generic[ResponseT]):
    """One HTTP request.

    Args:
        method: HTTP method.
        path: Below the base URL, with its parts escaped.
        response_type: What a success holds; of a stream, what its `completed` event holds.
        params: Query parameters.
        body: JSON, or None.
        is_idempotent: Whether it may be sent again although the first one may have been received.
        max_total_s: No retry begins later than this, a tighter bound than the retry policy's.
        min_read_timeout_s: Silence of the service to bear even if the client's own bound is less.
        max_read_timeout_s: Silence of the service to bear even if the client's own bound is more.
    """

    method: str
    path: str
    response_type: type[ResponseT]
    params: Mapping[str, str | int] = field(default_factory=dict)
    body: bytes | None = None
    is_idempotent: bool = False
    max_total_s: float | None = None
    min_read_timeout_s: float = 0.0
    max_read_timeout_s: float = math.inf

    def read_timeout_s(self, client_read_timeout_s: float) -> float:
        """Seconds of silence to bear."""
        return min(self.max_read_timeout_s, max(self.min_read_timeout_s, client_read_timeout_s))

    def parse(self, status: int, headers: Mapping[str, str], body: bytes) -> ResponseT:
        """Read the answer.

        Raises:
            OrthrosError: The service refused; the class tells why.
            UnexpectedResponseError: A success that is not of the expected form.
        """
        if not 200 <= status < 300:
            raise error_from_response(status, headers, body)
        return parse_json(self.response_type, body)


def parse_json(response_type: type[ResponseT], body: bytes | str) -> ResponseT:
    """Validate JSON of the service.

    Raises:
        UnexpectedResponseError: It is not of the expected form.
    """
    try:
        return response_type.model_validate_json(body)
    except ValidationError as error:
        entry = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in entry["loc"])
        raise UnexpectedResponseError(
            f"The answer is not a {response_type.__name__} ({where or 'body'}: {entry['msg']}). "
            "Check that the base URL is that of an Orthros service, not older than this client."
        ) from error
