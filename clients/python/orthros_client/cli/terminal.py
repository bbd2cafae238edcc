"""Writing to the terminal: results on standard output, everything else on standard error.

Texts of documents and answers are data. Control characters, escape sequences and marks that turn
the direction of writing could change what a terminal shows or does: they are written as escapes.
"""

import json
import re
import sys
from dataclasses import dataclass
from typing import Any, TextIO

from pydantic import BaseModel

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with everything but printable characters, tabs and line feeds escaped.

    Works character by character, so that a stream may be cut anywhere. Carriage returns are
    dropped: before a line feed they say nothing, elsewhere they would overwrite the line.
    """
    return _UNSAFE.sub(_escaped, text)


def one_line(text: str, *, max_chars: int = 300) -> str:
    """The printable text on one line, cut with an ellipsis where it is longer than max_chars."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= max_chars else f"{line[: max_chars - 1]}…"


def _escaped(match: re.Match[str]) -> str:
    character = match.group()
    if character == "\r":
        return ""
    code = ord(character)
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """Where a command writes.

    Args:
        is_json: Results are one JSON object each instead of text.
        is_quiet: Notes are left out.
    """

    is_json: bool
    is_quiet: bool

    def write(self, text: str) -> None:
        """Write a piece of a result at once."""
        _write(sys.stdout, text)

    def line(self, text: str = "") -> None:
        """Write a line of a result."""
        _write(sys.stdout, f"{text}\n")

    def object(self, value: BaseModel | dict[str, Any]) -> None:
        """Write the result of a command with `--json`, in ASCII and on one line."""
        content = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        self.line(json.dumps(content, ensure_ascii=True))

    def note(self, text: str) -> None:
        """Tell the user something that is not the result."""
        if not self.is_quiet:
            _write(sys.stderr, f"{text}\n")

    def error(self, text: str) -> None:
        """Tell the user what went wrong, also when quiet."""
        _write(sys.stderr, f"{text}\n")


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    stream.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
