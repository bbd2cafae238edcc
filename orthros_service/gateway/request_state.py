"""What is known of one HTTP request beside its content, kept in its ASGI scope."""

import time
from dataclasses import dataclass, field

from starlette.types import Scope

_KEY = "orthros_request"


@dataclass(slots=True, kw_only=True)
class RequestState:
    """Written while the request is worked on, read once when it has ended.

    Args:
        request_id: Names the request in answers and logs.
        arrived: `time.monotonic()` of its arrival.
        is_body_read: Whether the whole body has come.
        is_delivered: Whether a stream's last event has been handed to the server.
        error_code: Code of the error that it ended in, also of one that broke a stream.
        phase: How far a generation has come; None for other requests.
        numbers: Counts and seconds for the request's line in the log.
    """

    request_id: str
    arrived: float = field(default_factory=time.monotonic)
    is_body_read: bool = False
    is_delivered: bool = False
    error_code: str | None = None
    phase: str | None = None
    numbers: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.arrived

    @classmethod
    def of(cls, scope: Scope) -> "RequestState":
        """Return the state of the request that the scope belongs to."""
        state = scope[_KEY]
        assert isinstance(state, cls)
        return state

    def attach(self, scope: Scope) -> None:
        """Put the state into the scope."""
        scope[_KEY] = self
