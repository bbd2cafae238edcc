"""The id of a request: the caller's own if it is short and safe, otherwise one of ours; once."""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-ID"
_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def request_id_of(scope: Scope) -> str:
    """Return the id that a request brings if it may stand in headers and logs, or a new one."""
    given = Headers(scope=scope).get(REQUEST_ID_HEADER)
    if given is not None and _SAFE_REQUEST_ID.fullmatch(given):
        return given
    request_id = f"req_{uuid.uuid4().hex[:24]}"
    if given is not None:
        extra = {"request_id": request_id}
        logger.info("the caller's request id is not valid and was replaced", extra=extra)
    return request_id


class SingleRequestId:
    """ASGI middleware around a server that handles request ids itself, and anything in it.

    Ray Serve returns whatever id it was sent, and adds it to the one that the application returned.
    Inside of this there is one id per request, a valid one, and the response carries it once.

    Args:
        app: The server's own application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on under one id; other kinds of connection pass as they are."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        MutableHeaders(scope=scope)[REQUEST_ID_HEADER] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def serve_middlewares() -> list[Middleware]:
    """Return what Ray Serve puts around its own; it is named in an environment variable.

    The variable is RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH.
    """
    return [Middleware(SingleRequestId)]
