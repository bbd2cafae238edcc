"""Planned rows are read exactly once, in bounded chunks, also where bytes are damaged."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orthros_service.jobs.plan import make_plan
from orthros_service.jobs.reading import Chunk, ChunkReader
from orthros_service.jobs.spec import build_spec


def _read(source: Path, **values) -> list[Chunk]:
    spec = build_spec(
        input=str(source), output=str(source.parent / "out"), summarize=True, **values
    )
    plan = make_plan(spec)
    reader = ChunkReader.of(spec, plan)
    return [chunk for unit in plan.units for chunk in reader.read(unit)]


def _identities(chunks: list[Chunk]) -> list[tuple[str, int]]:
    return [
        (row["_source_file"], row["_source_row"])
        for chunk in chunks
        for row in chunk.identity.to_pylist()
    ]


def test_every_row_is_read_once_under_its_place_in_the_file(write):
    write("a.parquet", text=[f"a{i}" for i in range(23)], row_group_size=5)
    folder = write("sub/b.parquet", text=[f"b{i}" for i in range(7)])

    chunks = _read(folder, chunk_rows=4)

    expected = [("a.parquet", i) for i in range(23)] + [("sub/b.parquet", i) for i in range(7)]
    assert _identities(chunks) == expected
    assert [text for chunk in chunks for text in chunk.rows["text"].to_pylist()] == [
        f"{file[-9]}{row}" for file, row in expected
    ]
    assert max(chunk.rows.num_rows for chunk in chunks) <= 4
    assert len({chunk.name for chunk in chunks}) == len(chunks)


def test_reading_again_gives_the_same_chunks_under_the_same_names(write):
    folder = write(text=[f"text {i}" * i for i in range(50)], row_group_size=20)

    one, other = (_read(folder, chunk_rows=8, chunk_bytes=1500) for _ in range(2))

    assert [chunk.name for chunk in one] == [chunk.name for chunk in other]
    assert all(a.rows.equals(b.rows) for a, b in zip(one, other, strict=True))


def test_a_chunk_holds_few_large_documents_and_a_larger_one_stands_alone(write):
    small, large = "s" * 1000, "l" * 100_000
    folder = write(text=[small, small, large, small, small])

    chunks = _read(folder, chunk_bytes=10_000)

    assert all(chunk.rows.num_rows == 1 or chunk.rows.nbytes <= 10_000 for chunk in chunks)
    assert [row for _, row in _identities(chunks)] == [0, 1, 2, 3, 4]


def test_a_chunk_carries_only_the_dictionary_values_that_its_rows_use(write):
    texts = pa.array([f"{i} " + "x" * 1000 for i in range(100)] * 2).dictionary_encode()
    folder = write(text=texts)

    chunks = _read(folder, chunk_rows=10)

    assert max(chunk.to_ipc().size for chunk in chunks) < 20_000
    read = [text for chunk in chunks for text in chunk.rows["text"].to_pylist()]
    assert read == texts.to_pylist()
    assert {chunk.rows.schema.field("text").type for chunk in chunks} == {texts.type}


def test_a_chunk_survives_its_message(write, invalid_string):
    folder = write(
        text=invalid_string,
        d=pa.array(["p", None]).dictionary_encode(),
        v=pa.array(["view", None], pa.string_view()),
        n=[[{"a": [1]}], None],
    )
    (chunk,) = _read(folder)

    copy = Chunk.from_ipc(chunk.name, chunk.to_ipc())

    assert copy.rows.schema.equals(chunk.rows.schema, check_metadata=True)
    assert copy.rows.equals(chunk.rows)
    assert copy.identity.equals(chunk.identity)
    assert copy.read_errors.to_pylist() == [None, None]


def _damage(path: Path, group: int) -> None:
    """Overwrite the data pages of one row group; the footer stays good."""
    chunk = pq.read_metadata(path).row_group(group).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(bytes(data))


def test_rows_of_damaged_pages_come_out_as_error_rows_and_the_others_are_answered(write, run_job):
    folder = write(text=[f"text {i}" for i in range(30)], row_group_size=10)
    _damage(folder / "a.parquet", 1)

    job = run_job(folder)

    rows = job.rows()
    assert [row["_source_row"] for row in rows] == list(range(30))
    assert [row["status"] for row in rows] == ["ok"] * 10 + ["error"] * 10 + ["ok"] * 10
    assert {row["error_code"] for row in rows[10:20]} == {"unreadable_row"}
    assert all(row["error_message"] and row["text"] is None for row in rows[10:20])
    assert job.report.errors_by_code == {"unreadable_row": 10}


@pytest.mark.parametrize("codec", [3, 20])
def test_rows_of_a_codec_that_arrow_lacks_come_out_as_error_rows(write, run_job, codec):
    folder = write(text=["x", "y"])
    path = folder / "a.parquet"
    data = path.read_bytes()
    # The footer's field for the codec, Snappy, before the field that counts values.
    snappy = data.rindex(b"\x15\x02\x16")
    path.write_bytes(data[: snappy + 1] + bytes([2 * codec]) + data[snappy + 2 :])

    rows = run_job(folder).rows()

    assert [row["error_code"] for row in rows] == ["unreadable_row"] * 2
    assert "ompression" in rows[0]["error_message"]


def test_a_file_that_vanishes_after_the_plan_gives_error_rows(write, tmp_path):
    write("a.parquet", text=["x"])
    folder = write("b.parquet", text=["y"])
    spec = build_spec(input=str(folder), output=str(tmp_path / "out"), summarize=True)
    plan = make_plan(spec)
    (folder / "a.parquet").unlink()

    chunks = [chunk for unit in plan.units for chunk in ChunkReader.of(spec, plan).read(unit)]

    assert _identities(chunks) == [("a.parquet", 0), ("b.parquet", 0)]
    errors = [error for chunk in chunks for error in chunk.read_errors.to_pylist()]
    assert "a.parquet" in errors[0]
    assert errors[1] is None


def test_required_columns_do_not_stand_in_the_way_of_error_rows(tmp_path, run_job):
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])
    (tmp_path / "in").mkdir()
    pq.write_table(
        pa.table({"id": [1, 2], "text": ["x", "y"]}, schema=schema), tmp_path / "in" / "a.parquet"
    )
    _damage(tmp_path / "in" / "a.parquet", 0)

    assert [row["error_code"] for row in run_job(tmp_path / "in").rows()] == ["unreadable_row"] * 2


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_an_input_of_any_length_gives_a_readable_output(write, run_job, num_rows):
    job = run_job(write(text=pa.array(["x"] * num_rows, pa.string())))

    assert job.table().num_rows == num_rows == job.report.rows_out
    assert job.table().schema.names[:3] == ["text", "_source_file", "_source_row"]
    assert (job.output / "_SUCCESS").is_file()
