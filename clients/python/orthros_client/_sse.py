"""Server-sent events from bytes, without input or output, so that both clients share it.

Working on chunks rather than on whole events lets a wait check its deadline whenever bytes arrive,
also when they are only the comments that keep a connection alive.
"""

import codecs
from dataclasses import dataclass

from orthros_client.errors import UnexpectedResponseError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent:
    """One event; `name` is "message" where the server gave none."""

    name: str
    data: str


class EventDecoder:
    """Collects the bytes of a stream into events.

    Source: the WHATWG HTML standard, "Interpreting an event stream". Event ids and reconnection
    times are ignored: our streams are resumed by their content.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._line: list[str] = []
        self._ends_with_cr = False
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """Take the next bytes and return the events that they complete.

        Raises:
            UnexpectedResponseError: The bytes are not UTF-8.
        """
        try:
            text = self._utf8.decode(chunk)
        except UnicodeDecodeError as error:
            raise UnexpectedResponseError("The event stream is not UTF-8.") from error
        if self._ends_with_cr and text.startswith("\n"):
            text = text[1:]
            self._ends_with_cr = False
        if text:
            self._ends_with_cr = text.endswith("\r")
        pieces = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        events: list[ServerEvent] = []
        for piece in pieces[:-1]:
            line = "".join([*self._line, piece])
            self._line = []
            event = self._take_line(line)
            if event is not None:
                events.append(event)
        if pieces[-1]:
            self._line.append(pieces[-1])
        return events

    def _take_line(self, line: str) -> ServerEvent | None:
        if not line:
            event = ServerEvent(name=self._name or "message", data="\n".join(self._data))
            is_empty = not self._data
            self._name, self._data = "", []
            return None if is_empty else event
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)
        return None
