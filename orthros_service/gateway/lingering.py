"""Refusing a request whose body was not read, so that its client still learns why."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orthros_service.gateway.request_state import RequestState

LINGER_BYTES = 256 * 1024 * 1024
LINGER_S = 5.0


def has_unread_body(request: Request) -> bool:
    """Return whether the client may still be sending."""
    if RequestState.of(request.scope).is_body_read:
        return False
    headers = request.headers
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


class LingeringResponse(Response):
    """A response that is sent at once and then takes in what the client still sends, for a while.

    A connection that is closed while data arrives is reset, and the client loses the response. The
    rest of the body is thrown away; the connection closes after it, or when the client has sent too
    much or for too long.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, wait, and end it."""
        self.headers["Connection"] = "close"
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        # Whoever asks before sending has sent nothing, and must not be asked to begin.
        if Request(scope).headers.get("expect", "").lower() != "100-continue":
            await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while num_bytes < LINGER_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                num_bytes += len(message.get("body", b""))
    except TimeoutError:
        return
