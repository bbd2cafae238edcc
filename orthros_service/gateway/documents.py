"""The documents of the service: create, read, list and delete them."""

import asyncio
import logging
import secrets
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from orthros_client.types import (
    MAX_TITLE_CHARS,
    Document,
    DocumentDeleted,
    DocumentList,
    PrefillInfo,
    PrefillModeChoice,
    ProblemSummary,
)
from orthros_service.documents import DocumentRow
from orthros_service.errors import OrthrosError
from orthros_service.gateway.bodies import JSON_TYPE
from orthros_service.gateway.context import GatewayContext, get_context
from orthros_service.gateway.openapi import json_body, problems
from orthros_service.gateway.sources import find_document, inline_document
from orthros_service.gateway.uploads import FORM_TYPE, TEXT_TYPE, read_upload
from orthros_service.gateway.waits import within_timeout
from orthros_service.types import DocumentText

logger = logging.getLogger(__name__)

router = APIRouter(tags=["documents"])
Context = Annotated[GatewayContext, Depends(get_context)]

_FORM_SCHEMA = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "UTF-8 text."},
        "title": {"type": "string", "maxLength": MAX_TITLE_CHARS},
        "prefill_mode": {"type": "string", "enum": ["auto", "full", "linear"]},
    },
}
_CREATE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            TEXT_TYPE: {
                "schema": {"type": "string", "description": "The whole text, in UTF-8."},
                "example": "It is a truth universally acknowledged, that a single man...",
            },
            JSON_TYPE: {
                **json_body("DocumentCreate"),
                "example": {"text": "It is a truth universally...", "title": "Pride and Prejudice"},
            },
            FORM_TYPE: {"schema": _FORM_SCHEMA},
        },
    }
}


@router.post(
    "/v1/documents",
    name="documents",
    summary="Upload a text and start its ingestion",
    status_code=202,
    response_model=Document,
    responses={
        202: {"headers": {"Location": {"schema": {"type": "string"}}}},
        **problems(400, 413, 415, 422, 429, 503),
    },
    openapi_extra=_CREATE_BODY,
)
async def create_document(
    context: Context,
    request: Request,
    title: Annotated[
        str | None, Query(max_length=MAX_TITLE_CHARS, description="For text and forms.")
    ] = None,
    prefill_mode: Annotated[PrefillModeChoice, Query(description="For text and forms.")] = "auto",
) -> Response:
    """Return at once; follow `events` or read the document until it is `ready`.

    Text is stored with LF line ends and without a byte order mark, otherwise as it was sent.
    Documents with the same text share one state, so a text that is known may be ready at once.
    """
    upload = await read_upload(request, context.settings, title=title, prefill_mode=prefill_mode)
    text = inline_document(context, upload.text, upload.prefill_mode)
    text = replace(text, document_id=f"doc_{secrets.token_hex(12)}")
    await _store(context, text, title=upload.title, metadata=upload.metadata)
    # Read again: the ingestion of a known content may be done already.
    row = await asyncio.to_thread(find_document, context, text.document_id or "")
    return JSONResponse(
        document_of(row).model_dump(),
        status_code=202,
        headers={"Location": f"/v1/documents/{row.document_id}"},
    )


async def _store(
    context: GatewayContext,
    text: DocumentText,
    *,
    title: str | None,
    metadata: dict[str, str],
) -> None:
    document_id = text.document_id
    assert document_id is not None, "a stored document has an id"

    def put() -> None:
        # Asked first: a catalogue that does not answer then leaves nothing behind.
        is_known = context.catalog.count_content(text.content_key) > 0
        context.texts.put(text.content_key, text.text)
        try:
            context.catalog.create(
                document_id,
                title=title or "",
                content_key=text.content_key,
                num_chars=len(text.text),
                num_bytes=len(text.text.encode()),
                mode_choice=text.mode,
                metadata=metadata,
            )
        except Exception:
            if not is_known:
                _delete_text_quietly(context, text.content_key)
            raise

    # A deletion of the last document with the same content must not take the text away between.
    async with context.content_locks.hold(text.content_key):
        await asyncio.to_thread(put)
    try:
        await within_timeout(context.backend.ingest(text), what="take the document")
    except BaseException:
        # Nobody has learned the id; a document that is never ingested would stay queued for ever.
        await asyncio.shield(_undo(context, text.content_key, document_id))
        raise


@router.get(
    "/v1/documents",
    name="documents",
    summary="List documents, newest first",
    response_model=DocumentList,
    responses=problems(404, 422, 503),
)
async def list_documents(
    context: Context,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[
        str | None, Query(max_length=64, description="`next_after` of the page before.")
    ] = None,
) -> DocumentList:
    """Return one page; pages stay disjoint while documents come and go."""
    rows, has_more = await asyncio.to_thread(_list, context, limit, after)
    return DocumentList(
        data=[document_of(row) for row in rows],
        has_more=has_more,
        next_after=rows[-1].document_id if rows and has_more else None,
    )


def _list(context: GatewayContext, limit: int, after: str | None) -> tuple[list[DocumentRow], bool]:
    if after is not None:
        find_document(context, after)
    return context.catalog.list(limit, after)


@router.get(
    "/v1/documents/{document_id}",
    name="document",
    summary="Read a document's progress and data",
    response_model=Document,
    responses=problems(404, 503),
)
async def get_document(document_id: str, context: Context) -> Document:
    """Return the document without its text."""
    return document_of(await asyncio.to_thread(find_document, context, document_id))


@router.delete(
    "/v1/documents/{document_id}",
    name="document",
    summary="Delete a document",
    response_model=DocumentDeleted,
    responses=problems(404, 503),
)
async def delete_document(document_id: str, context: Context) -> DocumentDeleted:
    """Remove the document; its text and state go too unless another document shares them."""
    await _remove(context, document_id)
    return DocumentDeleted(id=document_id)


async def _remove(context: GatewayContext, document_id: str) -> None:
    """Delete a document, the state before the row: a caller whom that fails can ask again."""
    key = (await asyncio.to_thread(find_document, context, document_id)).content_key
    async with context.content_locks.hold(key):
        if await asyncio.to_thread(context.catalog.count_content, key) == 1:
            # The one row that is left may be another's if this document has gone meanwhile.
            await asyncio.to_thread(find_document, context, document_id)
            await within_timeout(context.backend.forget(key), what="drop the state")
        await asyncio.to_thread(_delete_row, context, document_id)


async def _undo(context: GatewayContext, key: str, document_id: str) -> None:
    """Delete a document that the workers refused, whatever they say to that."""
    async with context.content_locks.hold(key):
        if not await asyncio.to_thread(_delete_row, context, document_id):
            return
        try:
            await within_timeout(context.backend.forget(key), what="drop the state")
        except OrthrosError:
            logger.warning("the state of a refused document may be left behind", exc_info=True)


def _delete_row(context: GatewayContext, document_id: str) -> bool:
    """Delete a row, and the text if it was the last with it; return whether it was."""
    key = context.catalog.delete(document_id).content_key
    if context.catalog.count_content(key):
        return False
    context.texts.delete(key)
    return True


def _delete_text_quietly(context: GatewayContext, key: str) -> None:
    try:
        context.texts.delete(key)
    except OrthrosError:
        logger.warning("the text of a document that has no row is left behind", exc_info=True)


def document_of(row: DocumentRow) -> Document:
    """Return a row as the API shows it."""
    error = None
    if row.status == "failed":
        error = ProblemSummary(
            code=row.error_code or "internal", message=row.error_message or "No reason recorded."
        )
    return Document(
        id=row.document_id,
        status=row.status,
        title=row.title or None,
        metadata={name: str(value) for name, value in row.metadata.items()},
        num_chars=row.num_chars,
        num_tokens=row.num_tokens,
        prefill=PrefillInfo(
            mode=row.mode,
            tokens_done=row.tokens_done,
            tokens_total=row.num_tokens,
            tokens_per_s=row.tokens_per_s,
        ),
        error=error,
        created_at=row.created_at.isoformat().replace("+00:00", "Z"),
    )
