"""From document ids or inline text to what the backend generates over."""

import asyncio
import math
import re
from collections.abc import Sequence

from orthros_service.documents import DocumentRow, content_key, normalize_text
from orthros_service.errors import DocumentNotReadyError, NotFoundError
from orthros_service.gateway.context import GatewayContext
from orthros_service.types import DocumentText, PrefillModeChoice

_DOCUMENT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_RETRY_S = 60
_UNKNOWN_RETRY_S = 2


class DocumentFailedError(DocumentNotReadyError):
    """The document's ingestion failed; asking again does not help."""

    is_retryable = False


async def catalog_documents(
    context: GatewayContext, document_ids: Sequence[str]
) -> tuple[DocumentText, ...]:
    """Look documents up; every one must be ready.

    Raises:
        NotFoundError: An id is not in the catalogue.
        DocumentNotReadyError: A document is still being ingested, or failed.
    """
    return await asyncio.to_thread(_load, context, tuple(document_ids))


def find_document(context: GatewayContext, document_id: str) -> DocumentRow:
    """Look a document up; blocks, so call it in a thread.

    Raises:
        NotFoundError: There is none of this id, or the text is no id at all.
    """
    if not _DOCUMENT_ID.fullmatch(document_id):
        raise NotFoundError(
            "There is no such document; ids look like doc_0123456789abcdef01234567."
        )
    return context.catalog.get(document_id)


def _load(context: GatewayContext, document_ids: tuple[str, ...]) -> tuple[DocumentText, ...]:
    rows = [find_document(context, document_id) for document_id in document_ids]
    for row in rows:
        _require_ready(row)
    return tuple(
        DocumentText(
            content_key=row.content_key,
            text=context.texts.get(row.content_key),
            mode=row.mode_choice,
            document_id=row.document_id,
        )
        for row in rows
    )


def _require_ready(row: DocumentRow) -> None:
    if row.status == "ready":
        return
    if row.status == "failed":
        reason = row.error_message or "No reason was recorded."
        raise DocumentFailedError(
            f"The document {row.document_id} could not be ingested: {reason} Upload it again.",
            document_id=row.document_id,
            document_status=row.status,
            ingestion_code=row.error_code,
        )
    raise DocumentNotReadyError(
        f"The document {row.document_id} is {row.status}; ask again when it is ready, or follow "
        f"/v1/documents/{row.document_id}/events.",
        document_id=row.document_id,
        document_status=row.status,
        tokens_done=row.tokens_done,
        tokens_total=row.num_tokens,
        tokens_per_s=row.tokens_per_s,
        retry_after_s=_expected_s(row),
    )


def _expected_s(row: DocumentRow) -> int:
    if not row.num_tokens or not row.tokens_per_s:
        return _UNKNOWN_RETRY_S
    expected_s = (row.num_tokens - row.tokens_done) / row.tokens_per_s
    return min(max(math.ceil(expected_s), 1), _MAX_RETRY_S)


def inline_document(context: GatewayContext, text: str, mode: PrefillModeChoice) -> DocumentText:
    """Make a document of a text that came with the request.

    Raises:
        DocumentTooLargeError: The text is over the limit for documents.
        EmptyDocumentError: The text shows nothing.
    """
    normalized = normalize_text(text, max_bytes=context.settings.documents.max_bytes)
    return DocumentText(content_key=content_key(normalized, mode), text=normalized, mode=mode)
