"""Logging set-up: one line per record, text or JSON, with `request_id` and `phase` on every line.

Values are data: line breaks and control characters in them are escaped, so that one record is one
line and nobody can forge another. Document text, prompts and answers are never logged.
"""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

from orthros_service.settings import LogSettings
from orthros_service.telemetry.context import current_phase, current_request_id

# LogRecord's own attributes; whatever else a record has came from `extra=`.
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "request_id",
    "phase",
}


class ContextFilter(logging.Filter):
    """Puts the current request id and phase on each record that does not bring its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the two attributes; every record passes."""
        if not hasattr(record, "request_id"):
            record.request_id = current_request_id()
        if not hasattr(record, "phase"):
            record.phase = current_phase()
        return True


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extras(record: logging.LogRecord) -> dict[str, object]:
    # Names with an underscore are other libraries' own, such as Ray's time stamps.
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD_ATTRIBUTES and not name.startswith("_")
    }


def _escape(text: str) -> str:
    # JSON's escapes cover line breaks, control characters, lone surrogates and U+2028.
    return text if text.isprintable() else json.dumps(text)[1:-1].replace('\\"', '"')


def _traceback(record: logging.LogRecord) -> str | None:
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        # Not `formatException`, which prints: Ray Serve's print writes tuples.
        parts.append("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
    elif record.exc_text:
        # A record that crossed a process or a queue brings text in place of the exception.
        parts.append(record.exc_text)
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts) or None


class JsonFormatter(logging.Formatter):
    """One JSON object per line; `extra=` values become members."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of ASCII JSON."""
        entry: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            "phase": getattr(record, "phase", None),
        }
        entry |= {name: value for name, value in _extras(record).items() if name not in entry}
        exception = _traceback(record)
        if exception is not None:
            entry["exception"] = exception
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """`time level logger [request_id phase] message name=value`; a traceback is indented below."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text; only a traceback adds lines."""
        request_id = getattr(record, "request_id", None) or "-"
        phase = getattr(record, "phase", None) or "-"
        extras = "".join(
            f" {_escape(name)}={_escape(str(value))}" for name, value in _extras(record).items()
        )
        where = f"[{_escape(str(request_id))} {_escape(str(phase))}]"
        head = f"{_timestamp(record)} {record.levelname} {record.name} {where}"
        line = f"{head} {_escape(record.getMessage())}{extras}"
        exception = _traceback(record)
        if exception is None:
            return line
        return "\n    ".join([line, *(_escape(part) for part in exception.splitlines())])


def configure_logging(settings: LogSettings, *, stream: TextIO | None = None) -> None:
    """Send the logs of this process to one stream.

    Call it once at an entry point. A second call replaces the handler of the first; handlers that
    others have put on the root logger stay.

    Args:
        settings: Level and format.
        stream: Where the lines go; standard error by default, so that output stays clean.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.set_name("orthros")
    handler.addFilter(ContextFilter())
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    root = logging.getLogger()
    for existing in [one for one in root.handlers if one.get_name() == "orthros"]:
        root.removeHandler(existing)
    root.addHandler(handler)
    root.setLevel(settings.level)
