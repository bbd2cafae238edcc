"""Stop strings: the shown text does not depend on how the answer was cut into pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthros_service.engine.stopping import StopMatcher
from orthros_service.errors import InvalidValueError

# Two letters and one astral character make overlapping and nested stop strings likely.
TEXTS = st.text(alphabet="ab\U0001f600", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\U0001f600", min_size=1, max_size=5), max_size=4)


def one_shot(text: str, stop: list[str]) -> tuple[str, bool]:
    """The plain search over the whole text: first completed wins, of several the longest."""
    matches = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return (text[: min(matches)[1]], True) if matches else (text, False)


def run(pieces: list[str], stop: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(tuple(stop))
    shown = ""
    for piece in pieces:
        new, is_stopped = matcher.push(piece)
        shown += new
        if is_stopped:
            return shown + matcher.flush(), True
    return shown + matcher.flush(), False


def cut(text: str, borders: set[int]) -> list[str]:
    edges = [0, *sorted(border for border in borders if border < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(TEXTS, STOPS, st.sets(st.integers(0, 40)))
def test_any_chunking_shows_what_a_one_shot_search_shows(
    text: str, stop: list[str], borders: set[int]
) -> None:
    assert run(cut(text, borders), stop) == one_shot(text, stop)


@given(TEXTS, STOPS, st.sets(st.integers(0, 40)))
def test_only_what_could_begin_a_stop_string_is_held_back(
    text: str, stop: list[str], borders: set[int]
) -> None:
    matcher = StopMatcher(tuple(stop))
    shown = seen = ""
    for piece in cut(text, borders):
        seen += piece
        new, is_stopped = matcher.push(piece)
        if is_stopped:
            return
        shown += new
        prefixes = {s[:n] for s in stop for n in range(len(s))}
        longest = max((len(p) for p in prefixes if p and seen.endswith(p)), default=0)
        assert shown == seen[: len(seen) - longest]


def test_a_stop_string_across_three_pieces_is_never_shown() -> None:
    matcher = StopMatcher(("\n\nQuestion:",))
    assert matcher.push("Paris.\n") == ("Paris.", False)
    assert matcher.push("\nQues") == ("", False)
    assert matcher.push("tion: and more") == ("", True)
    assert matcher.push("still more") == ("", True)
    assert matcher.flush() == ""


def test_text_held_back_in_vain_comes_out_at_the_end() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert StopMatcher(("cdefg", "de")).push("abcdefgh") == ("abc", True)
    assert StopMatcher(("e", "cde")).push("abcdefgh") == ("ab", True)


def test_without_stop_strings_all_text_passes_at_once() -> None:
    assert StopMatcher(()).push("anything") == ("anything", False)


def test_a_long_repetitive_stop_string_costs_linear_time() -> None:
    matcher = StopMatcher(("a" * 20_000 + "b",))
    shown = "".join(matcher.push("a" * 4)[0] for _ in range(10_000))
    assert shown == "a" * 20_000
    assert matcher.push("b") == ("", True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="empty"):
        StopMatcher(("ok", ""))
