"""Server-sent events are the same however the network cuts them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthros_client._sse import EventDecoder, ServerEvent
from orthros_client.errors import UnexpectedResponseError

STREAM = (
    '\ufeffevent: delta\r\ndata: {"text": "é \U0001f600\u2028"}\r\n\r\n'
    ": heartbeat\n\n"
    "event: two\rdata: first\rdata:second\r\r"
    "data\n\n"
    "id: 7\nretry: 10\nevent: nothing\n\n"
    "data:  kept space\n\n"
    "event: unfinished\ndata: x\n"
).encode()
EVENTS = [
    ServerEvent(name="delta", data='{"text": "é \U0001f600\u2028"}'),
    ServerEvent(name="two", data="first\nsecond"),
    ServerEvent(name="message", data=""),
    ServerEvent(name="message", data=" kept space"),
]


def _decode(chunks):
    decoder = EventDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


def test_all_line_ends_comments_and_fields_are_read():
    assert _decode([STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=8).map(sorted))
def test_events_do_not_depend_on_where_the_network_cuts(cuts):
    edges = [0, *cuts, len(STREAM)]
    chunks = [STREAM[start:end] for start, end in pairwise(edges)]
    assert _decode(chunks) == EVENTS


def test_bytes_may_come_one_by_one():
    assert _decode([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


def test_an_event_is_given_as_soon_as_it_is_complete():
    decoder = EventDecoder()
    assert decoder.feed(b"data: x\n") == []
    assert decoder.feed(b"\n") == [ServerEvent(name="message", data="x")]


def test_bytes_that_are_not_utf8_are_refused():
    with pytest.raises(UnexpectedResponseError, match="UTF-8"):
        EventDecoder().feed(b"data: \xff\n\n")
