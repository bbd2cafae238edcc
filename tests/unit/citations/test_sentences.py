"""Sentence borders: exact offsets on every kind of text, in linear time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthros_service.citations import MAX_SENTENCE_CHARS, split_sentences


def split(text: str) -> list[str]:
    return [text[start:end] for start, end in split_sentences(text)]


@given(st.text(alphabet='ab1A .!?\n\r\t"\u3002\u300d\u0e01\U0001f600\x85', max_size=1500))
def test_pieces_cover_all_but_white_space_in_order(text: str) -> None:
    position = 0
    for start, end in split_sentences(text):
        assert not text[position:start].strip()
        assert 0 < end - start <= MAX_SENTENCE_CHARS
        assert text[start:end] == text[start:end].strip()
        position = end
    assert not text[position:].strip()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        (
            "Dr. J. Smith of the U.S. Navy came. He left.",
            ["Dr. J. Smith of the U.S. Navy came.", "He left."],
        ),
        (
            "See Fig. 2 and Li et al. (2020). It fits.",
            ["See Fig. 2 and Li et al. (2020).", "It fits."],
        ),
        ("It cost 3.50 in all. So did I. Then?", ["It cost 3.50 in all.", "So did I.", "Then?"]),
        ('"Who?" said he. "I!" She ran.', ['"Who?" said he.', '"I!"', "She ran."]),
        ("1. Mix it. Wait.\n2. Eat.\na. Rest", ["1. Mix it.", "Wait.", "2. Eat.", "a. Rest"]),
        ("Title\n\nname | age\nAnn | 7\nBob | 9", ["Title", "name | age", "Ann | 7", "Bob | 9"]),
        ("- milk\n- eggs\r\n- tea", ["- milk", "- eggs", "- tea"]),
        ("她来了。「他走了。」是的", ["她来了。", "「他走了。」", "是的"]),
        ("\u8d70\uff01\u6765\uff1f\u597d", ["\u8d70\uff01", "\u6765\uff1f", "\u597d"]),
        ("वह आया। वह गया।", ["वह आया।", "वह गया।"]),
        ("milk\neggs\nblack tea", ["milk", "eggs", "black tea"]),
        ("no marks at all", ["no marks at all"]),
        ("", []),
        (" \n\t ", []),
    ],
)
def test_borders(text: str, expected: list[str]) -> None:
    assert split(text) == expected


def test_hard_wrapped_prose_stays_whole() -> None:
    text = (
        "It is a truth universally acknowledged, that a single man in possession\n"
        "of a good fortune, must be in want of a wife. However little known the\n"
        "English may find it, he is considered as the rightful property of some\n"
        "one or other of their daughters.\n"
    )
    assert [piece.replace("\n", " ") for piece in split(text)] == [
        "It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife.",
        "However little known the English may find it, he is considered as the rightful property "
        "of some one or other of their daughters.",
    ]


def test_overlong_text_is_cut_at_softer_borders() -> None:
    pieces = split("word " * 60 + "end; " + "more " * 60)
    assert pieces[0].endswith("end;")
    assert [len(piece) for piece in split("x" * 1000)] == [400, 400, 200]


@pytest.mark.parametrize(
    "unit",
    ["Some plain words stand here. ", "x", ".", "? ", " ", "\n", "\r ", '!"', "字", "a.b", "\n-"],
)
def test_eight_times_the_text_takes_no_more_than_linear_time(unit: str) -> None:
    size = 100_000
    small, large = unit * (size // len(unit)), unit * (8 * size // len(unit))
    started = time.perf_counter()
    sum(1 for _ in split_sentences(small))
    middle = time.perf_counter()
    sum(1 for _ in split_sentences(large))
    # Eight times the text; quadratic time would be 64 times. The floor absorbs timer noise.
    assert time.perf_counter() - middle < 24 * max(middle - started, 0.02)
