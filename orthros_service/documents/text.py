"""Text as the service takes it: strict UTF-8, visible, one kind of line end."""

import hashlib
import re

from orthros_service.errors import (
    DocumentTooLargeError,
    EmptyDocumentError,
    InvalidTextError,
    InvalidValueError,
    MalformedRequestError,
)
from orthros_service.types import PrefillModeChoice

BYTE_ORDER_MARK = "\ufeff"

# White space, control characters, and what Unicode lets a font show as nothing: default-ignorable
# characters, blank fillers and the empty braille cell.
_VISIBLE = re.compile(
    r"[^\s\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    r"\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def decode_upload(data: bytes) -> str:
    """Decode the bytes of an uploaded text; a UTF-8 byte order mark is dropped.

    Raises:
        MalformedRequestError: The bytes are not UTF-8; `position` is the byte where that shows.
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")):
        raise MalformedRequestError(
            "The upload is UTF-16 or UTF-32 (a byte order mark at byte 0); only UTF-8 is read. "
            "Save the text as UTF-8 and send it again.",
            position=0,
        )
    try:
        return data.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise MalformedRequestError(
            f"The upload is not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start} cannot "
            "stand there. Save the text as UTF-8 (it may be Latin-1, Windows-1252 or no text at "
            "all) and send it again.",
            position=error.start,
        ) from error


def normalize_text(text: str, *, max_bytes: int | None = None) -> str:
    """Check a document's text and bring it to the form that is stored.

    Only line ends (CRLF and CR become LF) and a leading byte order mark change. Characters are not
    composed (NFC) or otherwise folded: citations quote the stored text, and a caller must find the
    quote, code point by code point, in the text that they sent.

    Args:
        text: The text as it was sent.
        max_bytes: Most bytes of UTF-8; None sets no limit.

    Raises:
        DocumentTooLargeError: The text has more than `max_bytes`.
        InvalidTextError: It holds a NUL character or a lone surrogate; `position` says where.
        EmptyDocumentError: It shows nothing: no characters, only white space, only invisible ones.
    """
    num_bytes = _checked_num_bytes(text, name="document", max_bytes=max_bytes)
    if max_bytes is not None and num_bytes > max_bytes:
        raise DocumentTooLargeError(
            f"The document has {num_bytes} bytes or more; at most {max_bytes} are taken. Split it "
            "into several documents.",
            limit=max_bytes,
            actual=num_bytes,
        )
    if not _VISIBLE.search(text):
        raise EmptyDocumentError(
            "The document is empty: it holds no visible character. Send a text with at least one."
        )
    return _one_line_end(text)


def check_text(
    text: str, *, field: str, max_bytes: int | None = None, is_required: bool = True
) -> str:
    """Check a short text, such as a question, and return it with LF line ends.

    Args:
        text: The text as it was sent.
        field: The field's name, for messages.
        max_bytes: Most bytes of UTF-8; None sets no limit.
        is_required: Whether a text that shows nothing is refused.

    Raises:
        InvalidTextError: It holds a NUL character or a lone surrogate; `position` says where.
        InvalidValueError: It has more than `max_bytes`, or shows nothing although required.
    """
    num_bytes = _checked_num_bytes(text, name=field, max_bytes=max_bytes)
    if max_bytes is not None and num_bytes > max_bytes:
        raise InvalidValueError(
            f"The {field} has {num_bytes} bytes or more; at most {max_bytes} are allowed.",
            field=field,
            limit=max_bytes,
            actual=num_bytes,
        )
    if is_required and not _VISIBLE.search(text):
        raise InvalidValueError(
            f"The {field} is empty: it holds no visible character. Send at least one.",
            field=field,
        )
    return _one_line_end(text)


def content_key(text: str, mode: PrefillModeChoice) -> str:
    """Name a content: SHA-256 hex of the forced mode and the normalized text.

    Args:
        text: The text as `normalize_text` returned it.
        mode: The forced mode; "auto" is a mode of its own, since the limit may change.
    """
    digest = hashlib.sha256(f"{mode}\n".encode())
    digest.update(text.encode())
    return digest.hexdigest()


def _checked_num_bytes(text: str, *, name: str, max_bytes: int | None) -> int:
    """Bytes of UTF-8; at least the number of characters where that alone is over the limit."""
    if max_bytes is not None and len(text) > max_bytes:
        return len(text)
    position = text.find("\0")
    if position >= 0:
        raise InvalidTextError(
            f"The {name} holds a NUL character at character {position}; remove it.",
            field=name,
            position=position,
        )
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidTextError(
            f"The {name} holds a lone surrogate at character {error.start}: half of a character "
            "that was cut in two. Send whole characters.",
            field=name,
            position=error.start,
        ) from error


def _one_line_end(text: str) -> str:
    return text.removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n").replace("\r", "\n")
