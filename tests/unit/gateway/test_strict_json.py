import contextlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthros_service.errors import InvalidTextError, MalformedRequestError
from orthros_service.gateway.strict_json import MAX_STRUCTURE, parse_json

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
values = st.recursive(
    scalars | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20
)


@given(values, st.booleans())
def test_every_ordinary_value_is_read_as_by_the_standard_library(value, is_ascii):
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert parse_json(body) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"a":1,"a":2}', "'a' is given twice"),
        (b'[{"x":[{"b":1,"c":2,"b":3}]}]', "'b' is given twice"),
        (b'{"a":1,"\\u0061":2}', "'a' is given twice"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":Infinity}', "Infinity"),
        (b'{"a":-Infinity}', "-Infinity"),
        (b'{"a":1e999}', "too large"),
        (b'{"a":-1e999}', "too large"),
        (b'{"a":' + b"1" * 5000 + b"}", "5000 characters"),
        (b'{"a":"caf\xe9"}', "not UTF-8"),
        ('{"a":1}'.encode("utf-16"), "not UTF-8"),
        ('{"a":1}'.encode("utf-16-le"), "not JSON"),
        (b"\x89PNG\r\n\x1a\n", "not UTF-8"),
        (b"", "empty"),
        (b" \n", "empty"),
        (b'{"a":1', "not JSON"),
        (b'{"a":1}{', "not JSON"),
        (b"{'a':1}", "not JSON"),
        (b'{"a":"\n"}', "not JSON"),
        (b"[" * 65 + b"]" * 65, "deeper than 64"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "deeper than 64"),
        (b"[" + b"0," * MAX_STRUCTURE + b"0]", "more than"),
    ],
)
def test_what_is_not_plain_json_is_refused_with_what_is_wrong(body, words):
    with pytest.raises(MalformedRequestError) as caught:
        parse_json(body)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":"emoji \\ud83d"}',
        b'{"\\ud83d":1}',
        b'[[["\\udc00"]]]',
        b'{"a":"nul \\u0000"}',
    ],
)
def test_lone_surrogates_and_nul_are_invalid_text_at_any_place(body):
    with pytest.raises(InvalidTextError):
        parse_json(body)


def test_a_byte_order_mark_pairs_of_surrogates_and_64_levels_are_fine():
    assert parse_json(b'\xef\xbb\xbf{"a":"\\ud83d\\ude00"}') == {"a": "😀"}
    parse_json(b"[" * 64 + b"]" * 64)


def test_brackets_and_commas_inside_strings_do_not_count():
    text = '[{,"\\' * 30_000
    assert parse_json(json.dumps({"text": text}).encode()) == {"text": text}


@pytest.mark.parametrize(
    "body",
    [
        b'{"document":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
        b"[" + b"[]," * 2_000_000 + b"[]]",
        b'{"a":"' + b'\\"' * 2_000_000,
        b'"' * 2_000_001,
        json.dumps({f"key{number}": number for number in range(100_000)}).encode(),
        b'{"a":0.' + b"1" * 2_000_000 + b"}",
    ],
    ids=["nesting", "lists", "escapes", "quotes", "keys", "digits"],
)
def test_hostile_bodies_cost_little_time(body):
    started = time.perf_counter()
    with contextlib.suppress(MalformedRequestError):
        parse_json(body)
    assert time.perf_counter() - started < 2
