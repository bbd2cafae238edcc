import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orthros_service.tokenization import TextStream


def stream(tokenizer, ids):
    text_stream = TextStream(tokenizer)
    return [text_stream.push(id_) for id_ in ids], text_stream.flush()


def ids_of_bytes(tokenizer):
    """Ids of single tokens that are no whole character."""
    ids = [id_ for id_ in range(tokenizer.vocab_size) if tokenizer.decode([id_]) == "\ufffd"]
    assert len(ids) > 50
    return ids[:200]


@pytest.fixture(scope="module")
def broken_ids(tiny):
    return ids_of_bytes(tiny)


@pytest.fixture(scope="module")
def default_broken_ids(default):
    return ids_of_bytes(default)


@settings(max_examples=200)
@given(data=st.data())
def test_the_pieces_join_to_the_decode_of_any_ids(tiny, data):
    ids = data.draw(st.lists(st.integers(0, tiny.vocab_size - 1), max_size=30))
    pieces, rest = stream(tiny, ids)
    assert "".join(pieces) + rest == tiny.decode(ids)


@settings(max_examples=200)
@given(data=st.data())
def test_the_pieces_join_to_the_decode_of_broken_bytes(tiny, broken_ids, data):
    words = tiny.encode_text("aé鍵😀\ufffd").token_ids.tolist()
    ids = data.draw(st.lists(st.sampled_from([*broken_ids, *words, *words, 0, 2]), max_size=24))
    pieces, rest = stream(tiny, ids)
    assert "".join(pieces) + rest == tiny.decode(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example(text="Leuchtturm 🏳️‍🌈 鍵はどこ e\u0301 \ufffd\ufffd\ufffd\ufffd end")
@example(text="  two leading spaces")
@example(text="a  b\n\n c ")
def test_the_pieces_of_a_text_join_to_its_decode(tokenizer, text):
    ids = tokenizer.encode_text(text).token_ids.tolist()
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_no_piece_ends_inside_a_character(tokenizer):
    text = "a🦉b鍵c"
    pieces, rest = stream(tokenizer, tokenizer.encode_text(text).token_ids.tolist())
    assert not any("\ufffd" in piece for piece in pieces)
    assert rest == ""


def test_text_is_shown_as_soon_as_it_is_whole(tiny):
    ids = tiny.encode_text("keeper of the 🦉!").token_ids.tolist()
    pieces, _ = stream(tiny, ids)
    whole = ""
    for count, piece in enumerate(pieces, start=1):
        whole += piece
        decoded = tiny.decode(ids[:count])
        assert whole == decoded.rstrip("\ufffd")


def test_an_unfinished_character_comes_out_of_flush_as_decode_shows_it(tokenizer):
    ids = tokenizer.encode_text("a🦉").token_ids.tolist()[:-1]
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) == "a"
    assert rest
    assert "a" + rest == tokenizer.decode(ids)


def test_replacement_characters_of_the_text_are_not_held_back_for_ever(tiny):
    ids = tiny.encode_text("\ufffd" * 50).token_ids.tolist()
    pieces, rest = stream(tiny, ids)
    assert len("".join(pieces)) == 49
    assert "".join(pieces) + rest == "\ufffd" * 50


def test_control_tokens_are_no_text_and_do_not_break_a_character(tiny):
    head, *others = tiny.encode_text("🦉").token_ids.tolist()
    pieces, rest = stream(tiny, [1, head, 2, *others, 0])
    assert "".join(pieces) + rest == "🦉"


def test_a_shown_character_stays_when_an_invalid_byte_follows(sentencepiece_like):
    ids = [3 + byte for byte in "é".encode()] + [3 + 0xE2]
    pieces, rest = stream(sentencepiece_like, ids)
    assert "".join(pieces) == "é"
    assert rest == "\ufffd"


def test_a_stream_can_be_used_again_after_flush(tiny):
    text_stream = TextStream(tiny)
    ids = tiny.encode_text("a🦉").token_ids.tolist()
    for id_ in ids[:-1]:
        text_stream.push(id_)
    assert text_stream.flush()
    assert "".join(text_stream.push(id_) for id_ in ids) == "a🦉"
    assert text_stream.flush() == ""


@pytest.mark.model
@settings(max_examples=300)
@given(data=st.data())
def test_the_default_models_pieces_join_to_its_decode(default, default_broken_ids, data):
    ids = data.draw(
        st.lists(st.one_of(st.sampled_from(default_broken_ids), st.integers(0, 49151)), max_size=40)
    )
    pieces, rest = stream(default, ids)
    assert "".join(pieces) + rest == default.decode(ids)
