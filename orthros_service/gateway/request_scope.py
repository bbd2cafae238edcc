"""The outermost layer: request ids, one log line per request, metrics, no leaked exception."""

import logging
from typing import Any

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orthros_service.gateway.problems import error_response, internal_error
from orthros_service.gateway.request_ids import REQUEST_ID_HEADER, request_id_of
from orthros_service.gateway.request_state import RequestState
from orthros_service.telemetry import MetricsSink, log_context

logger = logging.getLogger(__name__)


class RequestScope:
    """ASGI middleware around everything else.

    Args:
        app: The rest of the application.
        metrics: Where each finished request is counted.
    """

    def __init__(self, app: ASGIApp, *, metrics: MetricsSink) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request; other kinds of connection pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = RequestState(request_id=request_id_of(scope))
        state.attach(scope)
        receive = _watched(receive, state)
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = state.request_id
            await send(message)

        with log_context(request_id=state.request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                logger.exception("request failed: internal")
                state.error_code = "internal"
                if status is not None:
                    # The headers are gone: breaking the connection is the only honest end.
                    raise
                response = error_response(Request(scope), internal_error())
                await response(scope, receive, send_with_id)
            except BaseException:
                # Cancelled from outside: the server shuts down or the caller has gone. A caller who
                # leaves with the whole answer has cancelled nothing.
                if not state.is_delivered:
                    state.error_code = state.error_code or "cancelled"
                raise
            finally:
                self._record(scope, state, status)

    def _record(self, scope: Scope, state: RequestState, status: int | None) -> None:
        endpoint = _endpoint(scope)
        outcome = _outcome(state, status)
        self._metrics.increment(
            "orthros_requests_total",
            endpoint=endpoint,
            outcome=outcome,
            code=state.error_code or "none",
        )
        self._metrics.observe("orthros_request_duration_seconds", state.age_s, endpoint=endpoint)
        extra: dict[str, Any] = {
            "method": scope["method"],
            "endpoint": endpoint,
            "status": status,
            "outcome": outcome,
            "duration_s": round(state.age_s, 4),
            **state.numbers,
        }
        if state.error_code:
            extra["code"] = state.error_code
        if state.phase:
            extra["phase"] = state.phase
        logger.info("request finished", extra=extra)


def _watched(receive: Receive, state: RequestState) -> Receive:
    """Note the end of the body, and make of a server's failure what it is: the client left.

    Ray Serve raises in place of a message when it cancels a request, and when the proxy with the
    client's connection dies. Asked again it would never answer.
    """
    is_gone = False

    async def receive_watched() -> Message:
        nonlocal is_gone
        if is_gone:
            return {"type": "http.disconnect"}
        try:
            message = await receive()
        except Exception as error:  # noqa: BLE001 - which class, only the server knows
            is_gone = True
            logger.info("the client is gone: %s", type(error).__name__)
            return {"type": "http.disconnect"}
        if message["type"] == "http.request" and not message.get("more_body", False):
            state.is_body_read = True
        return message

    return receive_watched


def _endpoint(scope: Scope) -> str:
    # Routes are named after the metrics' closed set; an unknown path has no route.
    return str(getattr(scope.get("route"), "name", "other"))


def _outcome(state: RequestState, status: int | None) -> str:
    if state.error_code == "cancelled":
        return "cancelled"
    if status is None or status >= 500:
        return "server_error"
    if state.error_code is None:
        return "ok" if status < 400 else "client_error"
    # A stream that broke has sent 200 before.
    return "client_error" if 400 <= status < 500 else "server_error"
