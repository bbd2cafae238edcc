"""The output holds each row once, in valid files of one schema, or it is not called a success."""

import datetime
import decimal
import uuid

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from orthros_service.jobs.failures import IncompleteOutputError
from orthros_service.jobs.output import Receipt, verify_output
from orthros_service.jobs.output_schema import ADDED_COLUMNS
from orthros_service.jobs.utf8 import repair_strings

MOMENT = datetime.datetime(2024, 2, 29, 12, 0, 0, 123456)

COLUMNS = {
    "bool": pa.array([True, None]),
    "uint64": pa.array([2**64 - 1, None], pa.uint64()),
    "float16": pa.array([1.5, float("nan")], pa.float16()),
    "decimal128": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(38, 2)),
    "decimal256": pa.array([decimal.Decimal("1.50"), None], pa.decimal256(50, 2)),
    "date32": pa.array([MOMENT.date(), None]),
    "time64": pa.array([1, None], pa.time64("ns")),
    "timestamp_s": pa.array([MOMENT, None], pa.timestamp("s")),
    "timestamp_ns": pa.array([2**60 + 1, None], pa.timestamp("ns")),
    "timestamp_zone": pa.array([MOMENT, None], pa.timestamp("us", "Europe/Berlin")),
    "duration": pa.array([1, None], pa.duration("ms")),
    "fixed_binary": pa.array([b"abc", None], pa.binary(3)),
    "string_nul": pa.array(["x\0y\0", None]),
    "string_view": pa.array(["x" * 50, None], pa.string_view()),
    "dictionary": pa.array(["p", None]).dictionary_encode(),
    "null": pa.nulls(2),
    "list": pa.array([["a", None], None]),
    "nested_list": pa.array([[["a"], []], None]),
    "large_list": pa.array([[1], None], pa.large_list(pa.int16())),
    "fixed_list": pa.array([[1, 2], None], pa.list_(pa.int8(), 2)),
    "struct": pa.array([{"a": 1, "b": {"c": [1.5]}}, None]),
    "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int8())),
    "uuid": pa.array([uuid.UUID(int=1).bytes, None], pa.uuid()),
    "ünïcode name \n": pa.array(["x", None]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_an_input_column_of_any_type_comes_out_unchanged(write, run_job, name):
    folder = write(text=["one", "two"], **{name: COLUMNS[name]})
    before = pq.read_table(folder / "a.parquet")

    after = run_job(folder).table().select(before.schema.names)

    assert after.schema.equals(before.schema)
    # Compared as text, since NaN differs from itself.
    assert str(after.column(name).to_pylist()) == str(before.column(name).to_pylist())


def test_all_files_have_one_schema_also_where_a_column_holds_only_nulls(write, run_job):
    folder = write(text=["ok", "ok", None, "boom"], row_group_size=1)

    job = run_job(folder, chunk_rows=1)

    paths = sorted(job.output.glob("part-*.parquet"))
    schemas = [pq.read_schema(path) for path in paths]
    assert len(paths) == 4
    assert all(schema.equals(schemas[0], check_metadata=True) for schema in schemas)
    assert pads.dataset(job.output, format="parquet").to_table().num_rows == 4
    added = pa.schema([field for field in schemas[0] if field.name in ADDED_COLUMNS.names])
    assert added.equals(ADDED_COLUMNS)


def test_nothing_half_written_is_left_and_success_is_marked_last(write, run_job):
    job = run_job(write(text=["x", None]))

    names = {path.relative_to(job.output).as_posix() for path in job.output.rglob("*")}
    assert names == {"_SUCCESS", "_job", "_job/report.json", "part-000000-00000.parquet"}
    assert job.written_report()["rows_out"] == 2
    assert job.written_report()["spec"]["question"] == "What?"
    marked = (job.output / "_SUCCESS").stat().st_mtime_ns
    assert all(
        path.stat().st_mtime_ns <= marked for path in job.output.rglob("*") if path.is_file()
    )


def _receipts(job):
    return [
        Receipt(name=path.stem, num_rows=pq.read_metadata(path).num_rows)
        for path in job.output.glob("part-*.parquet")
    ]


@pytest.fixture
def finished(write, run_job):
    return run_job(write(text=[f"t{i}" for i in range(6)]), chunk_rows=2)


def test_a_lost_file_fails_the_job(finished):
    receipts = _receipts(finished)
    (finished.output / f"{receipts[0].name}.parquet").unlink()

    with pytest.raises(IncompleteOutputError, match="lacks 1"):
        verify_output(finished.output, plan=finished.plan, receipts=receipts)


def test_a_file_that_the_job_did_not_write_fails_it(finished):
    receipts = _receipts(finished)
    path = finished.output / f"{receipts[0].name}.parquet"
    (finished.output / "part-9.parquet").write_bytes(path.read_bytes())

    with pytest.raises(IncompleteOutputError, match="holds 1"):
        verify_output(finished.output, plan=finished.plan, receipts=receipts)


def test_rows_that_are_double_missing_or_of_another_file_fail_the_job(finished):
    first, second, _ = sorted(finished.output.glob("part-*.parquet"))
    table = pq.read_table(first)

    # As many rows as before, but two of them twice and two lost.
    pq.write_table(table, second)
    with pytest.raises(IncompleteOutputError, match="4 are distinct"):
        verify_output(finished.output, plan=finished.plan, receipts=_receipts(finished))

    other = pa.array(["other.parquet"] * 2)
    index = table.schema.get_field_index("_source_file")
    pq.write_table(table.set_column(index, table.schema.field(index), other), second)
    with pytest.raises(IncompleteOutputError, match="6 are distinct"):
        verify_output(finished.output, plan=finished.plan, receipts=_receipts(finished))


def test_ids_are_reported_and_never_relied_on(write, run_job):
    job = run_job(write(id=["a", "a", None, "b", "a"], text=["x"] * 5), id_column="id")
    assert job.report.rows_out == 5
    assert (job.report.ids.nulls, job.report.ids.repeated) == (1, 3)

    lists = run_job(write(id=[["a"], ["a"]], text=["x"] * 2), id_column="id")
    assert lists.report.rows_out == 2


def test_repairing_touches_invalid_strings_alone_at_any_depth(invalid_string):
    nested = {
        "struct": pa.StructArray.from_arrays([invalid_string], ["s"]),
        "list": pa.ListArray.from_arrays([0, 1, 2], invalid_string),
        "list_of_null": pa.ListArray.from_arrays(
            [0, 2, 2], invalid_string, mask=pa.array([False, True])
        ),
        "large_list": pa.LargeListArray.from_arrays([0, 1, 2], invalid_string),
        "fixed_list": pa.FixedSizeListArray.from_arrays(invalid_string, 1),
        "map": pa.MapArray.from_arrays([0, 1, 2], invalid_string, invalid_string),
        "dictionary": pa.DictionaryArray.from_arrays([0, 1], invalid_string),
        "view": invalid_string.cast(pa.string_view()),
        "binary": invalid_string.cast(pa.binary()),
    }
    table = pa.table(nested)
    for piece in (table, table.slice(1), table.slice(0, 1)):
        repaired, _ = repair_strings(piece)

        repaired.validate(full=True)
        assert repaired.schema == table.schema
        assert repaired.column("binary").equals(piece.column("binary"))
    rows = repair_strings(table)[0].to_pylist()
    bad, good = "ok\ufffd\ufffdbad", "fine"
    assert [row["struct"] for row in rows] == [{"s": bad}, {"s": good}]
    assert [row["list_of_null"] for row in rows] == [[bad, good], None]
    assert [row["map"] for row in rows] == [[(bad, bad)], [(good, good)]]
    assert [row["dictionary"] for row in rows] == [bad, good]


def test_progress_adds_up_to_the_report(write, run_job):
    job = run_job(write(text=["one two", None, "three", "boom"] * 20), chunk_rows=7)

    assert sum(each.num_rows for each in job.advances) == job.report.rows_out == 80
    assert sum(each.num_failed for each in job.advances) == job.report.rows_failed == 40
    assert job.report.document_tokens == 20 * 3
    assert job.report.tokens_per_s == (20 * 3 + 40 * 7 + 40 * 2) / 2.0
