"""Following a document's ingestion as a stream of events."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Depends, Response

from orthros_client.types import Document
from orthros_service.errors import OrthrosError
from orthros_service.gateway.context import GatewayContext, get_context
from orthros_service.gateway.documents import document_of
from orthros_service.gateway.openapi import Responses, problems
from orthros_service.gateway.problems import problem_json
from orthros_service.gateway.sources import find_document
from orthros_service.gateway.sse import HEARTBEAT, EventStream, encode_event

router = APIRouter(tags=["documents"])
Context = Annotated[GatewayContext, Depends(get_context)]

POLL_INTERVAL_S = 0.25
HEARTBEAT_INTERVAL_S = 15.0

_EXAMPLE = (
    'event: progress\ndata: {"id":"doc_...","status":"ingesting","prefill":{"tokens_done":4096,'
    '"tokens_total":10240,"tokens_per_s":1830.5,...},...}\n\n'
)
_RESPONSES: Responses = {
    200: {
        "description": (
            "`progress` events, each with the whole document. The last one has the status `ready` "
            "or `failed`. Comments keep the connection alive meanwhile. Anybody may leave and come "
            "back: the ingestion goes on, and a new stream begins with the present state."
        ),
        "content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EXAMPLE}},
    },
    **problems(404, 503),
}


@router.get(
    "/v1/documents/{document_id}/events",
    name="document_events",
    summary="Follow a document's ingestion",
    response_class=Response,
    responses=_RESPONSES,
)
async def follow_document(document_id: str, context: Context) -> Response:
    """Send the document now and whenever it changes, until it is ready or has failed."""
    first = await _read(context, document_id)
    return EventStream(_progress(context, first), encode_error=_encode_error)


async def _progress(context: GatewayContext, document: Document) -> AsyncGenerator[bytes, None]:
    yield _encode(document)
    last_sent = time.monotonic()
    while document.status not in ("ready", "failed"):
        await asyncio.sleep(POLL_INTERVAL_S)
        latest = await _read(context, document.id)
        if latest != document:
            document = latest
            yield _encode(document)
            last_sent = time.monotonic()
        elif time.monotonic() - last_sent >= HEARTBEAT_INTERVAL_S:
            yield HEARTBEAT
            last_sent = time.monotonic()


async def _read(context: GatewayContext, document_id: str) -> Document:
    return document_of(await asyncio.to_thread(find_document, context, document_id))


def _encode(document: Document) -> bytes:
    return encode_event(document.model_dump(), name="progress")


def _encode_error(error: OrthrosError) -> bytes:
    return encode_event(problem_json(error), name="error")
