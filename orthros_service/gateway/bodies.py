"""Reading request bodies: checked content types, bounded sizes, strict JSON."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from email.message import Message
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from orthros_service.errors import (
    DocumentTooLargeError,
    MalformedRequestError,
    UnsupportedDocumentError,
)
from orthros_service.gateway.context import get_context
from orthros_service.gateway.strict_json import parse_json

JSON_TYPE = "application/json"
# Python's names of the encodings of which UTF-8 is a superset or the same.
_UTF8_CHARSETS = (None, "utf-8", "utf8", "us-ascii", "ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaType:
    """A parsed Content-Type: the name in lower case, and the parameters that matter here."""

    name: str
    charset: str | None = None
    boundary: str | None = None

    @property
    def is_json(self) -> bool:
        """Whether the body claims to be JSON, also as `application/...+json`."""
        return self.name == JSON_TYPE or (
            self.name.startswith("application/") and self.name.endswith("+json")
        )


def media_type(request: Request) -> MediaType | None:
    """Return the request's content type; None where it has none."""
    header = request.headers.get("content-type")
    return parse_media_type(header) if header else None


def parse_media_type(header: str) -> MediaType:
    """Parse the value of a Content-Type header."""
    message = Message()
    message["content-type"] = header
    return MediaType(
        name=header.split(";", 1)[0].strip().lower(),
        charset=message.get_content_charset(),
        boundary=message.get_boundary(),
    )


def require_utf8(kind: MediaType) -> None:
    """Refuse a body that says it is in another encoding.

    Raises:
        MalformedRequestError: The charset is not one that UTF-8 covers.
    """
    if kind.charset not in _UTF8_CHARSETS:
        raise MalformedRequestError(
            "The Content-Type names a charset other than UTF-8; send the text as UTF-8."
        )


def unsupported(request: Request, allowed: Iterable[str]) -> UnsupportedDocumentError:
    """Return the 415 error that lists what this path reads."""
    names = ", ".join(allowed)
    given = "has no Content-Type" if media_type(request) is None else "has another Content-Type"
    return UnsupportedDocumentError(f"The request {given}; this path reads {names}.", allowed=names)


async def limited_stream(request: Request, *, limit: int) -> AsyncGenerator[bytes, None]:
    """Yield the body in chunks and stop as soon as it is over the limit.

    Raises:
        UnsupportedDocumentError: The body is compressed.
        DocumentTooLargeError: By the Content-Length, before anything is read, or by what has come.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedDocumentError(
            "The request has a Content-Encoding; bodies are read as they are. Send it without, "
            "or with identity.",
            allowed="identity",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large(limit, int(declared))
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > limit:
            raise too_large(limit, received)
        yield chunk


async def read_limited(request: Request, *, limit: int) -> bytes:
    """Read a whole body of at most `limit` bytes.

    Raises:
        UnsupportedDocumentError: The body is compressed.
        DocumentTooLargeError: The body is longer.
    """
    return b"".join([chunk async for chunk in limited_stream(request, limit=limit)])


def too_large(limit: int, actual: int) -> DocumentTooLargeError:
    """Return the 413 error of a body or file."""
    return DocumentTooLargeError(
        f"The request body has at least {actual} bytes; this path takes at most {limit}. "
        "Split the document, or send it as text/plain.",
        limit=limit,
        actual=actual,
    )


class _JsonRequest(Request):
    """A request whose JSON was parsed before FastAPI asks for it."""

    def __init__(self, original: Request, *, raw: bytes, value: object) -> None:
        super().__init__(original.scope, original.receive)
        self._raw = raw
        self._value = value

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._value


class JsonRoute(APIRoute):
    """A route whose body is strict JSON of bounded size; wrong content types are a 415."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler; requests without a body pass through."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            if request.method in ("GET", "DELETE", "HEAD"):
                return await handle(request)
            kind = media_type(request)
            if kind is None or not kind.is_json:
                raise unsupported(request, [JSON_TYPE])
            require_utf8(kind)
            limit = get_context(request).settings.gateway.max_json_bytes
            raw = await read_limited(request, limit=limit)
            return await handle(_JsonRequest(request, raw=raw, value=parse_json(raw)))

        return handle_json
