"""Turn the bytes of one cell into a document or a question, or say exactly what is wrong."""

import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from orthros_service.documents.text import BYTE_ORDER_MARK, check_text, normalize_text
from orthros_service.errors import InvalidTextError, InvalidValueError

RowErrorCode = Literal[
    "null_document", "document_too_large", "invalid_utf8", "invalid_text", "null_question",
    "unreadable_row",
]  # fmt: skip

# Characters that can hide instructions from a person: tags, directional overrides and isolates, and
# marks without width other than the joiners that scripts and emoji use.
_MAYBE_HIDDEN = re.compile("[\u200b\u2060\u202a-\u202e\u2066-\u2069\ufeff\U000e0001-\U000e007f]")
# The same, less tags of flag emoji and a byte order mark; slower, since it looks back everywhere.
_HIDDEN = re.compile(
    "(?<!\U0001f3f4)(?<![\U000e0020-\U000e007e])[\U000e0001-\U000e007f]"
    "|[\u200b\u2060\u202a-\u202e\u2066-\u2069]|(?<!^)\ufeff"
)


class RowRefusedError(Exception):
    """A row that no engine should see; it becomes an error row with this code."""

    def __init__(self, code: RowErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDocument:
    """A document as its row holds it, and as the service takes it.

    Args:
        original: The text of the row, to which the row's citations refer.
        text: The same with LF line ends and without a byte order mark.
    """

    original: str
    text: str

    def original_offsets(self, offsets: list[int]) -> list[int]:
        """Turn offsets in `text` into offsets in `original`, both in code points."""
        if len(self.original) == len(self.text):
            return offsets
        num_marks = int(self.original.startswith(BYTE_ORDER_MARK))
        # Every CRLF became one LF: the k-th one stands k characters further left in `text`.
        breaks = [
            match.start() - num_marks - index
            for index, match in enumerate(re.finditer("\r\n", self.original))
        ]
        return [offset + num_marks + bisect_left(breaks, offset) for offset in offsets]


def read_document(raw: bytes | None, *, max_bytes: int) -> RowDocument:
    """Decode a document.

    Raises:
        RowRefusedError: It is null, too large or not UTF-8.
        InvalidValueError: It is empty or holds NUL characters.
    """
    if raw is None:
        raise RowRefusedError("null_document", "The document is null.")
    if len(raw) > max_bytes:
        raise RowRefusedError(
            "document_too_large",
            f"The document has {len(raw):,} bytes; at most {max_bytes:,} are taken.",
        )
    original = _decode(raw, what="document")
    return RowDocument(original=original, text=normalize_text(original))


def read_question(raw: bytes | None) -> str:
    """Decode the question that a row brings.

    Raises:
        RowRefusedError: It is null, empty, not UTF-8, or holds NUL characters.
    """
    if raw is None:
        raise RowRefusedError("null_question", "The question is null.")
    try:
        return check_text(_decode(raw, what="question"), field="question")
    except InvalidTextError as error:
        raise RowRefusedError("invalid_text", error.message) from error
    except InvalidValueError as error:
        raise RowRefusedError("null_question", error.message) from error


def has_hidden_characters(text: str) -> bool:
    """Whether a text holds characters that a person does not see and a model reads.

    They are kept, since genuine texts have some of them; a job counts the rows.
    """
    candidate = _MAYBE_HIDDEN.search(text)
    return candidate is not None and _HIDDEN.search(text, candidate.start()) is not None


def repair_surrogates(text: str) -> str:
    """Replace lone surrogates by U+FFFD, so that the text can be stored as UTF-8."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _decode(raw: bytes, *, what: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        message = f"The {what} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}."
        raise RowRefusedError("invalid_utf8", message) from error
