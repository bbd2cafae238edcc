"""Which request and phase the running code works for; every log line carries both."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_request_id: ContextVar[str | None] = ContextVar("orthros_request_id", default=None)
_phase: ContextVar[str | None] = ContextVar("orthros_phase", default=None)


def current_request_id() -> str | None:
    """Return the id of the request that is being worked on; None outside any."""
    return _request_id.get()


def current_phase() -> str | None:
    """Return the phase of the work, such as "prefill"; None outside any."""
    return _phase.get()


@contextmanager
def log_context(*, request_id: str | None = None, phase: str | None = None) -> Iterator[None]:
    """Name the request or the phase for the log lines inside; None keeps what is already set.

    Values belong to the task that enters, and to the tasks that it starts inside. Enter and leave
    in the same task: do not hold it open over a `yield` of an async generator.
    """
    resets = []
    if request_id is not None:
        resets.append((_request_id, _request_id.set(request_id)))
    if phase is not None:
        resets.append((_phase, _phase.set(phase)))
    try:
        yield
    finally:
        for variable, token in reversed(resets):
            variable.reset(token)
