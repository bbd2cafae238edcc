"""Read planned rows in chunks of bounded size; rows that cannot be decoded still come out.

A chunk is what is answered and written together: one output file. It crosses processes as one Arrow
IPC message, so that no layer between can split it, merge it with others or change a column's type.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from orthros_service.jobs.footers import PARQUET_ERRORS
from orthros_service.jobs.output_schema import IDENTITY_COLUMNS
from orthros_service.jobs.plan import JobPlan, ReadUnit, RowRange
from orthros_service.jobs.schemas import cast_table
from orthros_service.jobs.spec import JobSpec

_log = logging.getLogger(__name__)

_BUFFER_BYTES = 1024 * 1024
_READ_ERROR = pa.field("_read_error", pa.string())


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some rows of the input.

    Args:
        name: Stem of its output file; the same whenever the same job reads the same rows again.
        identity: `_source_file` and `_source_row` of each row, a `pa.Table`.
        read_errors: Why a row could not be decoded; null for most. A `pa.ChunkedArray` of strings.
        rows: The input columns in the job's schema, a `pa.Table`.
    """

    name: str
    identity: Any
    read_errors: Any
    rows: Any

    def to_ipc(self) -> Any:
        """Pack the chunk into one `pa.Buffer`."""
        columns = [*self.identity.columns, self.read_errors, *self.rows.columns]
        schema = pa.schema([*IDENTITY_COLUMNS, _READ_ERROR, *self.rows.schema])
        table = pa.Table.from_arrays(columns, schema=schema).unify_dictionaries()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_table(table)
        return sink.getvalue()

    @classmethod
    def from_ipc(cls, name: str, message: Any) -> "Chunk":
        """Unpack a chunk without copying its columns."""
        with pa.ipc.open_stream(message) as reader:
            table = reader.read_all()
        num_identity = len(IDENTITY_COLUMNS)
        rows = table.select(range(num_identity + 1, table.num_columns))
        return cls(
            name=name,
            identity=table.select(range(num_identity)),
            read_errors=table.column(num_identity),
            rows=rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReader:
    """Reads units of one job.

    Args:
        root: Folder that file paths are relative to.
        schema: The job's `pa.Schema`; every chunk has it.
        chunk_rows: Most rows of a chunk.
        chunk_bytes: Most bytes of a chunk in memory; a single larger row stands alone.
    """

    root: str
    schema: Any
    chunk_rows: int
    chunk_bytes: int

    @classmethod
    def of(cls, spec: JobSpec, plan: JobPlan) -> Self:
        """Return the reader of a planned job."""
        return cls(
            root=plan.root,
            schema=plan.schema,
            chunk_rows=spec.chunk_rows,
            chunk_bytes=spec.chunk_bytes,
        )

    def read(self, unit: ReadUnit) -> Iterator[Chunk]:
        """Yield the rows of a unit in order, each exactly once, whatever the files hold."""
        index, pending, num_rows, num_bytes = 0, list[Any](), 0, 0
        for piece in self._pieces(unit):
            size = _row_bytes(piece)
            is_full = (
                num_rows + piece.num_rows > self.chunk_rows or num_bytes + size > self.chunk_bytes
            )
            if pending and is_full:
                yield self._chunk(unit, index, pending)
                index, pending, num_rows, num_bytes = index + 1, [], 0, 0
            pending.append(piece)
            num_rows, num_bytes = num_rows + piece.num_rows, num_bytes + size
        if pending:
            yield self._chunk(unit, index, pending)

    def _chunk(self, unit: ReadUnit, index: int, pieces: list[Any]) -> Chunk:
        table = pa.concat_tables(pieces)
        num_identity = len(IDENTITY_COLUMNS)
        rows = table.select(range(num_identity + 1, table.num_columns))
        return Chunk(
            name=f"part-{unit.index:06d}-{index:05d}",
            identity=table.select(range(num_identity)),
            read_errors=table.column(num_identity),
            rows=rows.replace_schema_metadata(self.schema.metadata),
        )

    def _pieces(self, unit: ReadUnit) -> Iterator[Any]:
        for each in unit.ranges:
            num_done = 0
            for rows, error in self._decode(each):
                first = each.first_row + num_done
                num_done += rows.num_rows
                yield from _split(_identify(rows, each.path, first, error), self.chunk_bytes)

    def _decode(self, each: RowRange) -> Iterator[tuple[Any, str | None]]:
        """Yield tables of a range with the job's schema; the rest of it follows as nulls."""
        num_done, error = 0, "the row group ends before the number of rows that its footer names"
        mean_bytes = max(1, each.num_bytes // each.num_rows)
        batch_rows = max(1, min(self.chunk_rows, self.chunk_bytes // mean_bytes))
        try:
            # Buffered, since else the whole row group is held at once, however small the batches.
            path = str(Path(self.root) / each.path)
            with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES) as file:
                batches = file.iter_batches(batch_size=batch_rows, row_groups=[each.row_group])
                for batch in batches:
                    wanted = batch.slice(0, each.num_rows - num_done)
                    table = cast_table(pa.Table.from_batches([wanted]), self.schema)
                    num_done += table.num_rows
                    yield table, None
                    if num_done == each.num_rows:
                        return
        except PARQUET_ERRORS as failure:
            error = " ".join(str(failure).split())
        _log.warning("row group %d of %s cannot be decoded: %s", each.row_group, each.path, error)
        while num_done < each.num_rows:
            num_rows = min(self.chunk_rows, each.num_rows - num_done)
            columns = [pa.nulls(num_rows, field.type) for field in self.schema]
            num_done += num_rows
            yield pa.Table.from_arrays(columns, schema=self.schema), error


def _identify(rows: Any, path: str, first: int, error: str | None) -> Any:
    rows = _compact_dictionaries(rows)
    columns = [
        pa.repeat(path, rows.num_rows),
        pa.array(range(first, first + rows.num_rows), pa.int64()),
        pa.repeat(pa.scalar(error, pa.string()), rows.num_rows),
        *rows.columns,
    ]
    return pa.Table.from_arrays(
        columns, schema=pa.schema([*IDENTITY_COLUMNS, _READ_ERROR, *rows.schema])
    )


def _compact_dictionaries(rows: Any) -> Any:
    """Drop dictionary values that these rows do not use, lest every chunk carries all of them."""
    for index, field in enumerate(rows.schema):
        if not pa.types.is_dictionary(field.type) or field.type.ordered:
            continue
        chunks = rows.column(index).chunks
        if all(len(chunk.dictionary) <= rows.num_rows for chunk in chunks):
            continue
        small = [_compact_dictionary(chunk) for chunk in chunks]
        rows = rows.set_column(index, field, pa.chunked_array(small, type=field.type))
    return rows


def _compact_dictionary(array: Any) -> Any:
    encoded = array.dictionary_decode().dictionary_encode()
    indices = encoded.indices.cast(array.type.index_type)
    return pa.DictionaryArray.from_arrays(indices, encoded.dictionary)


def _split(table: Any, num_bytes: int) -> Iterator[Any]:
    if table.num_rows <= 1 or _row_bytes(table) <= num_bytes:
        yield table
        return
    middle = table.num_rows // 2
    yield from _split(table.slice(0, middle), num_bytes)
    yield from _split(table.slice(middle), num_bytes)


def _row_bytes(table: Any) -> int:
    """Bytes that these rows hold, without dictionaries, which slices share."""
    return sum(column.nbytes for column in table.columns if not pa.types.is_dictionary(column.type))
