"""Segments as Arrow IPC files: one record batch of one row, read back without copying.

Columns: `token_ids` list<int32>, `char_starts` and `char_ends` list<int64>, `kv` large_binary (the
raw bits; Arrow has no bfloat16). Schema metadata: `content_key`, `layout` (JSON), `start` and
`checksum`, a CRC-32 chained over the metadata and every column. CRC-32 because it finds damage at
several GB/s; it is no defence against forgery.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from orthros_service.errors import StateCorruptedError, StateMismatchError
from orthros_service.state.types import (
    FORMAT_VERSION,
    STORAGE_DTYPES,
    Segment,
    StateLayout,
)

SCHEMA = pa.schema(
    [
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("char_starts", pa.list_(pa.int64()), nullable=False),
        pa.field("char_ends", pa.list_(pa.int64()), nullable=False),
        pa.field("kv", pa.large_binary(), nullable=False),
    ]
)


def read_layout(fields: object) -> StateLayout:
    """Build a layout from what `json.loads` gave for one.

    Raises:
        StateMismatchError: Another format version wrote it.
        StateCorruptedError: It is not a layout at all.
    """
    if not isinstance(fields, dict) or "format_version" not in fields:
        raise StateCorruptedError("The stored layout cannot be read. Prefill again.")
    version = fields["format_version"]
    if version != FORMAT_VERSION:
        raise StateMismatchError(
            f"The state has format_version {version!r}, this worker reads {FORMAT_VERSION}. "
            "Ingest the document again."
        )
    try:
        return StateLayout(**fields)
    except TypeError as error:
        raise StateCorruptedError("The stored layout has other fields. Prefill again.") from error


def write_segment(
    segment: Segment, *, layout: StateLayout, content_key: str, sink: pa.NativeFile
) -> None:
    """Write one segment to an open file; K/V are not copied.

    Raises:
        StateMismatchError: The segment's arrays do not have the layout's shape or dtype.
        OSError: The file cannot be written.
    """
    _check_arrays(segment, layout)
    kv = np.ascontiguousarray(segment.kv)
    offsets = np.array([0, kv.nbytes], dtype=np.int64)
    kv_column = pa.Array.from_buffers(
        pa.large_binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(kv)]
    )
    columns = [
        _one_list(segment.token_ids),
        _one_list(segment.char_starts),
        _one_list(segment.char_ends),
        kv_column,
    ]
    metadata = {
        b"content_key": content_key.encode(),
        b"layout": json.dumps(asdict(layout), sort_keys=True).encode(),
        b"start": str(segment.start).encode(),
    }
    metadata[b"checksum"] = _checksum(metadata, segment).encode()
    schema = SCHEMA.with_metadata(metadata)
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))


def encode_segment(segment: Segment, *, layout: StateLayout, content_key: str) -> pa.Buffer:
    """One segment as the bytes of an Arrow IPC file; see `write_segment`."""
    sink = pa.BufferOutputStream()
    write_segment(segment, layout=layout, content_key=content_key, sink=sink)
    return sink.getvalue()


def read_segment(
    source: pa.NativeFile | pa.Buffer, *, layout: StateLayout, content_key: str
) -> Segment:
    """Read one segment as read-only views of the source (a memory map or a buffer).

    Args:
        source: An open memory map or file, or the bytes of a file.
        layout: What the reader expects, `mode` included.
        content_key: The document that the reader expects.

    Raises:
        StateMismatchError: Made by another model, tokenizer, dtype, mode or version, or for another
            document.
        StateCorruptedError: Truncated, damaged, or not an Arrow file.
    """
    try:
        reader = pa.ipc.open_file(source)
        metadata: Mapping[bytes, bytes] = reader.schema.metadata or {}
        _check_identity(metadata, layout, content_key)
        if not reader.schema.equals(SCHEMA) or reader.num_record_batches != 1:
            raise StateCorruptedError("The file does not hold one segment. Prefill again.")
        batch = reader.get_batch(0)
        batch.validate(full=True)
        segment = _to_segment(batch, metadata, layout)
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
        raise StateCorruptedError(
            f"The segment cannot be read ({type(error).__name__}). Prefill again."
        ) from error
    if metadata.get(b"checksum") != _checksum(metadata, segment).encode():
        raise StateCorruptedError("The segment does not match its checksum. Prefill again.")
    return segment


def _check_identity(
    metadata: Mapping[bytes, bytes], expected: StateLayout, content_key: str
) -> None:
    stored = read_layout(json.loads(metadata[b"layout"]))
    stored.check_matches(expected)
    if stored.mode != expected.mode:
        raise StateMismatchError(
            f"The state's mode is {stored.mode!r}, {expected.mode!r} was expected. "
            "Ingest the document again."
        )
    if metadata[b"content_key"] != content_key.encode():
        raise StateMismatchError("The segment belongs to another document. Prefill again.")


def _to_segment(
    batch: pa.RecordBatch, metadata: Mapping[bytes, bytes], layout: StateLayout
) -> Segment:
    if batch.num_rows != 1:
        raise StateCorruptedError("The file does not hold one segment. Prefill again.")
    token_ids, char_starts, char_ends = (
        batch.column(index)[0].values.to_numpy(zero_copy_only=True) for index in range(3)
    )
    bits = np.frombuffer(_only_value(batch.column(3)), dtype=STORAGE_DTYPES[layout.dtype])
    kv = bits.reshape(_kv_shape(layout, token_ids.shape[0]))
    # A view of a read-only map must not look writable: writing would kill the process.
    kv.flags.writeable = False
    segment = Segment(
        start=int(metadata[b"start"]),
        token_ids=token_ids,
        char_starts=char_starts,
        char_ends=char_ends,
        kv=kv,
    )
    if not len(token_ids) == len(char_starts) == len(char_ends):
        raise StateCorruptedError("The segment's columns differ in length. Prefill again.")
    return segment


def _only_value(column: pa.Array) -> pa.Buffer:
    # Not `column[0].as_buffer()`: a scalar copies its bytes.
    _, offsets, data = column.buffers()
    if offsets is None or data is None:
        raise StateCorruptedError("The segment holds no keys and values. Prefill again.")
    start, end = np.frombuffer(offsets, dtype=np.int64)[column.offset : column.offset + 2]
    return data.slice(int(start), int(end - start))


def _kv_shape(layout: StateLayout, num_tokens: int) -> tuple[int, int, int, int, int]:
    return (layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)


def _check_arrays(segment: Segment, layout: StateLayout) -> None:
    num_tokens = segment.num_tokens
    wanted = {
        "token_ids": (np.dtype(np.int32), (num_tokens,)),
        "char_starts": (np.dtype(np.int64), (num_tokens,)),
        "char_ends": (np.dtype(np.int64), (num_tokens,)),
        "kv": (STORAGE_DTYPES[layout.dtype], _kv_shape(layout, num_tokens)),
    }
    for name, (dtype, shape) in wanted.items():
        array = getattr(segment, name)
        if array.dtype != dtype or array.shape != shape:
            raise StateMismatchError(
                f"{name} is {array.dtype} {array.shape}, the layout asks for {dtype} {shape}."
            )


def _one_list(values: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> pa.Array:
    offsets = pa.array([0, len(values)], type=pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values))


def _checksum(metadata: Mapping[bytes, bytes], segment: Segment) -> str:
    value = 0
    for name in (b"content_key", b"layout", b"start"):
        value = zlib.crc32(metadata[name], value)
    for array in (segment.token_ids, segment.char_starts, segment.char_ends, segment.kv):
        value = zlib.crc32(np.ascontiguousarray(array).data, value)
    return f"{value:08x}"
