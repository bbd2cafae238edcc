"""The state of a streamed answer, without input or output, so that both clients share it."""

from collections.abc import Iterator

from orthros_client._problems import error_from_event
from orthros_client._sse import EventDecoder
from orthros_client._wire_request import parse_json
from orthros_client.errors import OrthrosError, StreamBrokenError
from orthros_client.types import Answer, AnswerDelta


class AnswerAssembler:
    """Collects the events of one streamed answer or summary."""

    def __init__(self) -> None:
        self._decoder = EventDecoder()
        self._texts: list[str] = []
        self._answer: Answer | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the `completed` event has arrived."""
        return self._answer is not None

    @property
    def text(self) -> str:
        """What has arrived so far."""
        return "".join(self._texts)

    @property
    def answer(self) -> Answer:
        """The finished answer.

        Raises:
            StreamBrokenError: The stream has not been read to its end.
        """
        if self._answer is None:
            raise StreamBrokenError(
                "The answer is not complete: the stream was not read to its end. Read all of its "
                "deltas first.",
                partial_text=self.text,
            )
        return self._answer

    def feed(self, chunk: bytes) -> Iterator[AnswerDelta]:
        """Take the next bytes; events of names that we do not know are passed over.

        Raises:
            OrthrosError: The service ended the stream with an `error` event.
            UnexpectedResponseError: An event cannot be read.
        """
        for event in self._decoder.feed(chunk):
            match event.name:
                case "delta":
                    delta = parse_json(AnswerDelta, event.data)
                    self._texts.append(delta.text)
                    yield delta
                case "completed":
                    self._answer = parse_json(Answer, event.data)
                    return
                case "error":
                    raise error_from_event(event.data)

    def end(self, cause: OrthrosError | None) -> None:
        """Note that no more bytes will come.

        Raises:
            StreamBrokenError: The `completed` event has not arrived.
        """
        if self._answer is not None:
            return
        reason = "the connection ended first." if cause is None else cause.message
        raise StreamBrokenError(
            f"The answer is not complete: {reason} Ask again; what arrived is in partial_text.",
            partial_text=self.text,
        ) from cause
