"""Stop strings in streamed text: what may be shown now, what must wait, when the answer ends."""

from collections.abc import Sequence

from orthros_service.errors import InvalidValueError


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of the pattern, how long its longest proper prefix and suffix in one is."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table


class StopMatcher:
    """Watches one answer for its stop strings, however the text is cut into pieces.

    The stop string that is complete first ends the answer (of several that end together, the
    longest): generation would have stopped there, so how the text was cut cannot matter. Text that
    could still become part of a stop string is held back; the stop string itself is never shown.
    Time is linear in the text for any stop strings.

    Args:
        stop: Texts that end the answer; with none, all text passes at once.

    Raises:
        InvalidValueError: A stop string is empty.

    Source: Knuth, Morris and Pratt 1977, "Fast pattern matching in strings"; one automaton for
    each stop string.
    """

    __slots__ = ("_held", "_is_stopped", "_matched", "_patterns", "_tables")

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise InvalidValueError("A stop string is empty; each needs at least one character.")
        self._patterns = tuple(dict.fromkeys(stop))
        self._tables = tuple(_failure_table(pattern) for pattern in self._patterns)
        self._matched = [0] * len(self._patterns)
        self._held = ""
        self._is_stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece of the answer.

        Args:
            text: The piece; any length, also empty.

        Returns:
            The text that may be shown now, and whether a stop string has been completed. After
            that, all further text is dropped.
        """
        if self._is_stopped:
            return "", True
        if not self._patterns:
            return text, False
        seen = self._held + text
        for offset, character in enumerate(text, start=len(self._held) + 1):
            stop_length = self._advance(character)
            if stop_length:
                self._is_stopped = True
                self._held = ""
                return seen[: offset - stop_length], True
        shown_end = len(seen) - max(self._matched)
        self._held = seen[shown_end:]
        return seen[:shown_end], False

    def flush(self) -> str:
        """End the answer: give out the text held back for a stop string that never came."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._patterns)
        return held

    def _advance(self, character: str) -> int:
        """Feed one character to all automata; the length of the longest stop string done, or 0."""
        completed = 0
        for number, pattern in enumerate(self._patterns):
            length = self._matched[number]
            while length and pattern[length] != character:
                length = self._tables[number][length - 1]
            if pattern[length] == character:
                length += 1
            if length == len(pattern):
                completed = max(completed, length)
            self._matched[number] = length
        return completed
