"""The ways in which a document arrives: plain text, JSON, or the one file of a form."""

from collections.abc import AsyncGenerator
from typing import get_args

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from orthros_client.types import MAX_TITLE_CHARS, DocumentCreate, PrefillModeChoice
from orthros_service.documents import check_text, decode_upload
from orthros_service.errors import MalformedRequestError
from orthros_service.gateway.bodies import (
    JSON_TYPE,
    MediaType,
    limited_stream,
    media_type,
    parse_media_type,
    read_limited,
    require_utf8,
    too_large,
    unsupported,
)
from orthros_service.gateway.problems import invalid_field, invalid_fields
from orthros_service.gateway.strict_json import parse_json
from orthros_service.settings import Settings

TEXT_TYPE = "text/plain"
FORM_TYPE = "multipart/form-data"
ALLOWED_TYPES = (TEXT_TYPE, JSON_TYPE, FORM_TYPE)

# Boundaries, part headers and the small fields of a form.
_FORM_OVERHEAD_BYTES = 16 * 1024
_FORM_FIELDS = ("title", "prefill_mode")


async def read_upload(
    request: Request, settings: Settings, *, title: str | None, prefill_mode: PrefillModeChoice
) -> DocumentCreate:
    """Read the document of a request.

    Args:
        request: The request; its body is read here, never beyond the limits.
        settings: Limits in bytes.
        title: Of the query; a form's or a JSON body's own title may not stand beside it.
        prefill_mode: Of the query, likewise.

    Raises:
        OrthrosError: The body is too large, of another type, not UTF-8, or not as described.
    """
    kind = media_type(request)
    if kind is None:
        raise unsupported(request, ALLOWED_TYPES)
    if not kind.is_json and kind.name not in ALLOWED_TYPES:
        raise unsupported(request, ALLOWED_TYPES)
    require_utf8(kind)
    if kind.is_json:
        return await _from_json(request, settings)
    if kind.name == TEXT_TYPE:
        raw = await read_limited(request, limit=settings.documents.max_bytes)
        return _validated(decode_upload(raw), title=title, prefill_mode=prefill_mode)
    return await _from_form(request, settings, kind, title=title, prefill_mode=prefill_mode)


def _validated(text: str, *, title: str | None, prefill_mode: str) -> DocumentCreate:
    values = {"text": text, "title": title, "prefill_mode": prefill_mode}
    if title is not None:
        check_text(title, field="title", is_required=False)
    try:
        return DocumentCreate.model_validate(values)
    except ValidationError as error:
        raise invalid_fields(error.errors(include_input=False, include_url=False)) from None


async def _from_json(request: Request, settings: Settings) -> DocumentCreate:
    for name in _FORM_FIELDS:
        if name in request.query_params:
            raise invalid_field(name, "with a JSON body it belongs into the body, not the query")
    value = parse_json(await read_limited(request, limit=settings.gateway.max_json_bytes))
    try:
        return DocumentCreate.model_validate(value)
    except ValidationError as error:
        raise invalid_fields(error.errors(include_input=False, include_url=False)) from None


async def _from_form(
    request: Request,
    settings: Settings,
    kind: MediaType,
    *,
    title: str | None,
    prefill_mode: PrefillModeChoice,
) -> DocumentCreate:
    limit = settings.documents.max_bytes + _FORM_OVERHEAD_BYTES
    form = await _parse_form(request, kind, limit)
    try:
        file = _only_file(form)
        require_utf8(parse_media_type(file.content_type or ""))
        # The parser keeps large files on disk; one over the limit is refused before it is read.
        if (file.size or 0) > settings.documents.max_bytes:
            raise too_large(settings.documents.max_bytes, file.size or 0)
        text = decode_upload(await file.read())
    finally:
        await form.close()
    for name in _FORM_FIELDS:
        if name in form and name in request.query_params:
            raise invalid_field(name, "is given in the form and in the query; give it once")
    return _validated(
        text,
        title=_field(form, "title") or title or (file.filename or "")[:MAX_TITLE_CHARS] or None,
        prefill_mode=_field(form, "prefill_mode") or prefill_mode,
    )


class _Utf8FormParser(MultiPartParser):
    """Refuses names and fields that are not UTF-8; the parser itself would guess at them."""

    def on_part_end(self) -> None:
        part = self._current_part
        try:
            bytes(part.content_disposition or b"").decode()
            bytes(part.data).decode()
        except UnicodeDecodeError:
            raise MultiPartException("a name or a field is not UTF-8; send UTF-8.") from None
        super().on_part_end()


async def _parse_form(request: Request, kind: MediaType, limit: int) -> FormData:
    if not kind.boundary:
        raise MalformedRequestError("The Content-Type of a form needs a boundary parameter.")
    stream = _whole_form(limited_stream(request, limit=limit), f"--{kind.boundary}--".encode())
    parser = _Utf8FormParser(request.headers, stream, max_files=1, max_fields=len(_FORM_FIELDS))
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise MalformedRequestError(f"The form cannot be read: {error.message}") from None


async def _whole_form(
    chunks: AsyncGenerator[bytes, None], closing: bytes
) -> AsyncGenerator[bytes, None]:
    """Pass a form on, and refuse one that was cut off: the parser itself would not notice."""
    tail = b""
    async for chunk in chunks:
        tail = (tail + chunk)[-_FORM_OVERHEAD_BYTES:]
        yield chunk
    if closing not in tail:
        raise MalformedRequestError("The form was cut off before its end; send it again.")


def _only_file(form: FormData) -> UploadFile:
    unknown = sorted(set(form) - {"file", *_FORM_FIELDS})
    if unknown:
        raise invalid_field(
            unknown[0][:64], "is not a field of this form: file, title, prefill_mode"
        )
    for name in sorted(set(form)):
        if len(form.getlist(name)) > 1:
            raise invalid_field(name, "is given more than once; give it once")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise invalid_field("file", "the form needs one file part with a filename")
    return file


def _field(form: FormData, name: str) -> str | None:
    value = form.get(name)
    if value is None or isinstance(value, str):
        return value
    raise invalid_field(name, f"is a text field; allowed: {', '.join(get_args(PrefillModeChoice))}")
