"""Server-sent events: one JSON value per event, on one line of ASCII.

JSON's escapes keep U+2028, U+2029, U+0085 and line breaks of an answer from ending an event early.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orthros_service.errors import CancelledError, OrthrosError
from orthros_service.gateway.disconnects import until_disconnect
from orthros_service.gateway.problems import internal_error, log_failure
from orthros_service.gateway.request_state import RequestState

HEARTBEAT = b": heartbeat\n\n"


def encode_event(data: object, *, name: str | None = None) -> bytes:
    """Return one event.

    Args:
        data: Anything that JSON can hold.
        name: The event's name; None leaves it to be a plain "message".
    """
    head = f"event: {name}\n" if name else ""
    body = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return f"{head}data: {body}\n\n".encode("ascii")


class EventStream(Response):
    """A response whose events come from a generator.

    The generator is closed when the client leaves. An error in it becomes one last event, after
    which nothing follows.

    Args:
        events: Encoded events; owned by this response.
        encode_error: Renders the error that ended the stream.
        on_close: Frees what the events come from, also if none was ever asked for.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        encode_error: Callable[[OrthrosError], bytes],
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        # The length of a stream is not known.
        del self.headers["content-length"]
        self._events = events
        self._encode_error = encode_error
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        state = RequestState.of(scope)
        try:
            await until_disconnect(Request(scope, receive), self._send_all(state, send))
        except CancelledError as error:
            state.error_code = error.code
        finally:
            await self._events.aclose()
            if self._on_close is not None:
                await self._on_close()

    async def _send_all(self, state: RequestState, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as failure:  # noqa: BLE001 - the edge of a stream; it is logged
            error = failure if isinstance(failure, OrthrosError) else internal_error()
            state.error_code = error.code
            log_failure(error, what="stream", cause=failure)
            event = self._encode_error(error)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
