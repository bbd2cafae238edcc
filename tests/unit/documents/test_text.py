import hashlib
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthros_service.documents import check_text, content_key, decode_upload, normalize_text
from orthros_service.errors import (
    DocumentTooLargeError,
    EmptyDocumentError,
    InvalidTextError,
    InvalidValueError,
    MalformedRequestError,
)

INVISIBLE = [
    "",
    "   ",
    " \t\r\n\x0b\x0c\u0085\u00a0\u2003\u2028\u2029\u3000",
    "\ufeff",
    "\u200b\u200c\u200d\u2060\ufeff",
    "\u00ad\u034f\u061c\u180e",
    "\u115f\u1160\u3164\uffa0\u2800",
    "\ufe0f\U000e0100\U000e0041",
    "\x01\x1f\x7f\x9f",
]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_utf_8_is_decoded_as_it_is(text):
    assert decode_upload(text.encode()) == text.removeprefix("\ufeff")


def test_a_byte_order_mark_is_dropped_once():
    assert decode_upload(b"\xef\xbb\xbftext") == "text"
    assert decode_upload("\ufeff\ufefftext".encode()) == "\ufefftext"


@pytest.mark.parametrize(
    ("data", "position", "word"),
    [
        ("café".encode("latin-1"), 3, "Latin-1"),
        (b"ok\xff", 2, "0xff"),
        (b"cut \xe2\x82", 4, "byte 4"),
        (b"\xed\xa0\x80", 0, "byte 0"),
        (b"\xc0\xaf", 0, "byte 0"),
        ("text".encode("utf-16"), 0, "UTF-16"),
        (b"\xfe\xff\x00t", 0, "UTF-16"),
        ("text".encode("utf-32"), 0, "UTF-32"),
        (b"\x89PNG\r\n\x1a\n", 0, "0x89"),
    ],
)
def test_bytes_that_are_not_utf_8_are_refused_with_place_and_cure(data, position, word):
    with pytest.raises(MalformedRequestError, match=word) as caught:
        decode_upload(data)
    assert caught.value.details["position"] == position
    assert "Save the text as UTF-8" in caught.value.message


def test_only_line_ends_and_the_byte_order_mark_change():
    text = "\ufeffa\r\nb\rc\n\r\n\r\rd e\u0301 \u00e9 \u2028 ﬁ \u200bx \t "
    assert normalize_text(text) == "a\nb\nc\n\n\n\nd e\u0301 \u00e9 \u2028 ﬁ \u200bx \t "
    decomposed = unicodedata.normalize("NFD", "é")
    assert normalize_text(decomposed) == decomposed


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_normalizing_twice_changes_nothing_more(text):
    try:
        once = normalize_text("x" + text)
    except EmptyDocumentError:
        return
    assert normalize_text(once) == once
    assert "\r" not in once


@pytest.mark.parametrize("text", INVISIBLE, ids=ascii)
def test_a_text_that_shows_nothing_is_an_empty_document(text):
    with pytest.raises(EmptyDocumentError):
        normalize_text(text)
    with pytest.raises(InvalidValueError, match="question is empty"):
        check_text(text, field="question")
    assert check_text(text, field="title", is_required=False) is not None


@pytest.mark.parametrize("char", ["a", ".", "0", "鍵", "😀", "\u0301", "\ufffd", "\ue000", "⠁"])
def test_one_visible_character_is_a_document(char):
    assert normalize_text(f"\u200b {char} ") == f"\u200b {char} "


@pytest.mark.parametrize(
    ("text", "position", "word"),
    [
        ("ab\0c", 2, "NUL"),
        ("é\ud83d", 1, "surrogate"),
        ("\udc00", 0, "surrogate"),
        ("a\r\n\r\nb\0", 6, "NUL"),
    ],
    ids=ascii,
)
def test_characters_that_no_text_may_hold_are_refused_with_their_position(text, position, word):
    for check in (normalize_text, lambda text: check_text(text, field="document")):
        with pytest.raises(InvalidTextError, match=word) as caught:
            check(text)
        assert caught.value.details == {"field": "document", "position": position}
        assert caught.value.code == "invalid_text"


@pytest.mark.parametrize("text", ["x" * 11, "é" * 6, "鍵" * 4, "😀" * 3])
def test_a_text_over_the_limit_is_refused_with_limit_and_size(text):
    with pytest.raises(DocumentTooLargeError) as caught:
        normalize_text(text, max_bytes=10)
    assert caught.value.details["limit"] == 10
    assert 10 < caught.value.details["actual"] <= len(text.encode())
    with pytest.raises(InvalidValueError, match="at most 10") as caught:
        check_text(text, field="question", max_bytes=10)
    assert caught.value.details["field"] == "question"


@pytest.mark.parametrize("text", ["x" * 10, "é" * 5, "鍵" * 3, "😀" * 2])
def test_a_text_at_the_limit_is_taken(text):
    assert normalize_text(text, max_bytes=10) == text
    assert check_text(text, field="question", max_bytes=10) == text


def test_a_field_has_one_kind_of_line_end_too():
    assert check_text("a\r\nb", field="question") == "a\nb"


def test_the_content_key_follows_text_and_mode_only():
    key = content_key("text", "auto")
    assert key == content_key("text", "auto")
    assert key == hashlib.sha256(b"auto\ntext").hexdigest()
    others = {
        content_key("text", "full"),
        content_key("text", "linear"),
        content_key("text ", "auto"),
        content_key("auto\ntext", "auto"),
    }
    assert len(others | {key}) == 5
