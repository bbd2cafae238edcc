from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from orthros_service.errors import StateCorruptedError, StateError, StateMismatchError
from orthros_service.state.arrow import encode_segment, read_layout, read_segment, write_segment
from orthros_service.state.types import Segment

KEY = "ab" * 32


def same(left: Segment, right: Segment) -> bool:
    names = ("token_ids", "char_starts", "char_ends", "kv")
    return left.start == right.start and all(
        getattr(left, name).dtype == getattr(right, name).dtype
        and np.array_equal(getattr(left, name), getattr(right, name))
        for name in names
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_a_segment_survives_encoding_bit_for_bit(layout, make_segments, dtype, num_tokens):
    layout = replace(layout, dtype=dtype)
    segment = make_segments(num_tokens, dtype=dtype)[0]

    data = encode_segment(segment, layout=layout, content_key=KEY)

    assert same(read_segment(data, layout=layout, content_key=KEY), segment)


def test_bits_that_are_not_numbers_survive(layout, make_segments):
    layout = replace(layout, dtype="float32")
    segment = make_segments(4, dtype="float32")[0]
    segment.kv[0, 0, 0, 0] = [np.nan, -np.inf]

    data = encode_segment(segment, layout=layout, content_key=KEY)

    read = read_segment(data, layout=layout, content_key=KEY)
    assert read.kv.tobytes() == segment.kv.tobytes()


def test_a_segment_with_strided_keys_is_stored_in_logical_order(layout, make_segments):
    segment = make_segments(4)[0]
    strided = np.swapaxes(np.ascontiguousarray(np.swapaxes(segment.kv, 2, 3)), 2, 3)
    doubled = np.repeat(strided, 2, axis=3)[:, :, :, ::2]

    data = encode_segment(replace(segment, kv=doubled), layout=layout, content_key=KEY)

    assert same(read_segment(data, layout=layout, content_key=KEY), segment)


def test_a_memory_mapped_segment_is_read_only_and_not_copied(tmp_path, layout, make_segments):
    path = tmp_path / "segment.arrow"
    segment = make_segments(4)[0]
    with pa.OSFile(str(path), "wb") as sink:
        write_segment(segment, layout=layout, content_key=KEY, sink=sink)
    source = pa.memory_map(str(path), "r")
    mapped = source.read_buffer()

    read = read_segment(source, layout=layout, content_key=KEY)

    for array in (read.token_ids, read.char_starts, read.char_ends, read.kv):
        assert not array.flags.writeable
        assert mapped.address <= array.ctypes.data < mapped.address + mapped.size
    path.unlink()
    assert same(read, segment)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_digest", "model-b"),
        ("tokenizer_digest", "tokenizer-b"),
        ("num_layers", 3),
        ("num_kv_heads", 2),
        ("head_dim", 4),
        ("dtype", "float16"),
        ("window", 8),
        ("num_sinks", 2),
        ("segment_tokens", 8),
        ("mode", "full"),
    ],
)
def test_a_state_of_another_layout_is_refused_by_the_field_that_differs(
    layout, make_segments, name, value
):
    data = encode_segment(make_segments(4)[0], layout=layout, content_key=KEY)

    with pytest.raises(StateMismatchError, match=name):
        read_segment(data, layout=replace(layout, **{name: value}), content_key=KEY)


def test_another_format_version_is_a_mismatch_even_with_other_fields():
    with pytest.raises(StateMismatchError, match="format_version 2"):
        read_layout({"format_version": 2, "shards": 4})


@pytest.mark.parametrize("fields", [None, [], {}, {"format_version": 1}, "layout"])
def test_something_that_is_no_layout_is_corrupted(fields):
    with pytest.raises(StateCorruptedError):
        read_layout(fields)


def test_a_segment_of_another_document_is_refused(layout, make_segments):
    data = encode_segment(make_segments(4)[0], layout=layout, content_key=KEY)

    with pytest.raises(StateMismatchError, match="another document"):
        read_segment(data, layout=layout, content_key="cd" * 32)


def test_every_truncation_is_noticed(layout, make_segments):
    data = encode_segment(make_segments(4)[0], layout=layout, content_key=KEY).to_pybytes()

    for length in range(len(data)):
        with pytest.raises(StateError):
            read_segment(pa.py_buffer(data[:length]), layout=layout, content_key=KEY)


def test_every_flipped_byte_is_harmless_or_noticed(layout, make_segments):
    segment = make_segments(4)[0]
    data = encode_segment(segment, layout=layout, content_key=KEY).to_pybytes()
    num_noticed = 0

    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= 0xFF
        try:
            read = read_segment(pa.py_buffer(bytes(damaged)), layout=layout, content_key=KEY)
        except StateError:
            num_noticed += 1
        else:
            assert same(read, segment), index

    assert num_noticed > segment.kv.nbytes


@pytest.mark.parametrize("data", [b"", b"not arrow at all", b"ARROW1\0\0" * 8, bytes(4096)])
def test_bytes_that_are_not_arrow_are_corrupted(layout, data):
    with pytest.raises(StateCorruptedError):
        read_segment(pa.py_buffer(data), layout=layout, content_key=KEY)


def test_arrow_files_of_other_shapes_are_corrupted(layout, make_segments):
    good = pa.ipc.open_file(encode_segment(make_segments(4)[0], layout=layout, content_key=KEY))
    schema, batch = good.schema, good.get_batch(0)
    bare = pa.schema([pa.field("x", pa.int32())])
    candidates = [
        (bare, [pa.record_batch([pa.array([1], pa.int32())], schema=bare)]),
        (bare.with_metadata(schema.metadata), []),
        (schema, []),
        (schema, [batch, batch]),
        (schema, [batch.slice(0, 0)]),
        (schema, [pa.concat_batches([batch, batch])]),
    ]

    for odd_schema, batches in candidates:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, odd_schema) as writer:
            for one in batches:
                writer.write_batch(one)
        with pytest.raises(StateCorruptedError):
            read_segment(sink.getvalue(), layout=layout, content_key=KEY)


def test_a_segment_that_does_not_fit_its_layout_is_not_written(layout, make_segments):
    segment = make_segments(4)[0]

    for wrong in (
        replace(segment, kv=segment.kv.astype(np.float32)),
        replace(segment, kv=segment.kv[:, :, :, :3]),
        replace(segment, char_starts=segment.char_starts[:2]),
        replace(segment, token_ids=segment.token_ids.astype(np.int64)),
    ):
        with pytest.raises(StateMismatchError):
            encode_segment(wrong, layout=layout, content_key=KEY)
