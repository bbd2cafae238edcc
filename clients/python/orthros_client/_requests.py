"""The service's operations as plain values: what both clients send, and what they expect back."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from orthros_client._problems import invalid_arguments
from orthros_client._wire_request import QUICK_READ_TIMEOUT_S, WireRequest
from orthros_client.errors import (
    InvalidTextError,
    InvalidValueError,
    MalformedRequestError,
)
from orthros_client.options import AskOptions, SummaryOptions
from orthros_client.types import (
    Answer,
    AnswerRequest,
    Document,
    DocumentCreate,
    DocumentDeleted,
    DocumentList,
    ModelList,
    PrefillModeChoice,
    RequestModel,
    SummaryRequest,
    TokenCount,
    TokenCountRequest,
)

DEADLINE_GRACE_S = 10.0
MAX_PAGE_DOCUMENTS = 100

DocumentSource = str | bytes | os.PathLike[str]


def upload_request(
    source: DocumentSource,
    *,
    title: str | None,
    metadata: Mapping[str, str] | None,
    prefill_mode: PrefillModeChoice,
) -> WireRequest[Document]:
    """`POST /v1/documents`; a path also gives the title, unless there is one."""
    text, file_name = _read_source(source)
    values: dict[str, Any] = {"text": text, "prefill_mode": prefill_mode}
    if title is not None or file_name is not None:
        values["title"] = file_name if title is None else title
    if metadata is not None:
        values["metadata"] = dict(metadata)
    body = _encode(DocumentCreate, values)
    return WireRequest(method="POST", path="/v1/documents", response_type=Document, body=body)


def document_request(document_id: str) -> WireRequest[Document]:
    """`GET /v1/documents/{id}`."""
    return WireRequest(
        method="GET",
        path=document_path(document_id),
        response_type=Document,
        is_idempotent=True,
        max_read_timeout_s=QUICK_READ_TIMEOUT_S,
    )


def delete_request(document_id: str) -> WireRequest[DocumentDeleted]:
    """`DELETE /v1/documents/{id}`; sent twice, it would report an unknown document."""
    return WireRequest(
        method="DELETE",
        path=document_path(document_id),
        response_type=DocumentDeleted,
        max_read_timeout_s=QUICK_READ_TIMEOUT_S,
    )


class Pages:
    """The pages of `GET /v1/documents`, one request after the other.

    Args:
        limit: Most documents to return; None returns all.

    Raises:
        InvalidValueError: limit is below 1.
    """

    def __init__(self, *, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise InvalidValueError(f"limit is {limit}; give 1 or more, or None for all documents.")
        self._num_wanted = limit
        self._after: str | None = None
        self._has_more = True

    def next_request(self) -> WireRequest[DocumentList] | None:
        """The request of the next page, or None after the last."""
        if not self._has_more or self._num_wanted == 0:
            return None
        params: dict[str, str | int] = {"limit": MAX_PAGE_DOCUMENTS}
        if self._num_wanted is not None:
            params["limit"] = min(self._num_wanted, MAX_PAGE_DOCUMENTS)
        if self._after is not None:
            params["after"] = self._after
        return WireRequest(
            method="GET",
            path="/v1/documents",
            response_type=DocumentList,
            params=params,
            is_idempotent=True,
            max_read_timeout_s=QUICK_READ_TIMEOUT_S,
        )

    def take(self, page: DocumentList) -> list[Document]:
        """The documents of a page that are wanted."""
        self._after = page.next_after
        self._has_more = page.has_more and page.next_after is not None
        documents = page.data[: self._num_wanted]
        if self._num_wanted is not None:
            self._num_wanted -= len(documents)
        return documents


def answer_request(question: str, options: AskOptions, *, is_stream: bool) -> WireRequest[Answer]:
    """`POST /v1/answers`."""
    values = {"question": question, **_generation_values(dict(options), is_stream=is_stream)}
    return _generation_request("/v1/answers", AnswerRequest, values)


def summary_request(options: SummaryOptions, *, is_stream: bool) -> WireRequest[Answer]:
    """`POST /v1/summaries`."""
    values = _generation_values(dict(options), is_stream=is_stream)
    return _generation_request("/v1/summaries", SummaryRequest, values)


def token_count_request(text: str) -> WireRequest[TokenCount]:
    """`POST /v1/tokens:count`; it changes nothing, so it may be sent again."""
    body = _encode(TokenCountRequest, {"text": text})
    return WireRequest(
        method="POST",
        path="/v1/tokens:count",
        response_type=TokenCount,
        body=body,
        is_idempotent=True,
    )


def models_request() -> WireRequest[ModelList]:
    """`GET /v1/models`."""
    return WireRequest(
        method="GET",
        path="/v1/models",
        response_type=ModelList,
        is_idempotent=True,
        max_read_timeout_s=QUICK_READ_TIMEOUT_S,
    )


def document_path(document_id: str) -> str:
    """The path of a document; its id is one path part, whatever characters it holds.

    Raises:
        InvalidValueError: The id is empty or would name another path.
    """
    if document_id in {"", ".", ".."}:
        raise InvalidValueError(f"{document_id!r} is not a document id; `upload` returns one.")
    try:
        return f"/v1/documents/{quote(document_id, safe='')}"
    except UnicodeEncodeError as error:
        raise InvalidValueError("A document id holds lone surrogates.") from error


def decode_utf8(content: bytes) -> str:
    """The text of a file.

    Raises:
        MalformedRequestError: The bytes are not UTF-8; the message says from where on.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedRequestError(
            f"The document is not UTF-8: byte {error.start} cannot be read. Convert it first."
        ) from error


def _read_source(source: DocumentSource) -> tuple[str, str | None]:
    if isinstance(source, str):
        return source, None
    file_name = None
    if not isinstance(source, bytes):
        path = Path(source)
        source = path.read_bytes()
        # A file name may hold bytes that are no text.
        file_name = path.name.encode("utf-8", "replace").decode("utf-8")
    return decode_utf8(source), file_name


def _generation_values(options: dict[str, Any], *, is_stream: bool) -> dict[str, Any]:
    values = {name: value for name, value in options.items() if value is not None}
    if isinstance(values.get("document_ids"), str):
        values["document_ids"] = [values["document_ids"]]
    for name in ("document_ids", "stop", "history"):
        if isinstance(values.get(name), tuple):
            values[name] = list(values[name])
    return values | {"stream": is_stream}


def _generation_request(
    path: str, request_type: type[RequestModel], values: dict[str, Any]
) -> WireRequest[Answer]:
    body = _encode(request_type, values)
    deadline_s = values.get("deadline_s")
    return WireRequest(
        method="POST",
        path=path,
        response_type=Answer,
        body=body,
        max_total_s=deadline_s,
        min_read_timeout_s=0.0 if deadline_s is None else deadline_s + DEADLINE_GRACE_S,
    )


def _encode(request_type: type[RequestModel], values: dict[str, Any]) -> bytes:
    try:
        content = request_type(**values).model_dump(exclude_unset=True)
        return json.dumps(content, ensure_ascii=False).encode("utf-8")
    except ValidationError as error:
        raise invalid_arguments(error) from error
    except UnicodeEncodeError as error:
        raise InvalidTextError(
            "The request was not sent: a text holds lone surrogates, which are not characters."
        ) from error
