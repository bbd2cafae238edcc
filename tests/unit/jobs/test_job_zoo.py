"""Parquet files of many writers: every row comes out, with its columns as pyarrow reads them."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from orthros_service.errors import InvalidValueError
from orthros_service.jobs.schemas import is_text

ZOO = Path(__file__).parents[4] / "shared" / "cases" / "parquet_zoo"
# A column of gigabyte keys: it does not fit into the memory of a test.
TOO_LARGE = {"pqtest__large_string_map.brotli.parquet"}


def _files(folder):
    if not ZOO.is_dir():
        return [pytest.param(None, marks=pytest.mark.skip(f"the shared files are not at {ZOO}"))]
    paths = sorted((ZOO / folder).rglob("*.parquet"))
    return [pytest.param(path, id=path.name) for path in paths if path.name not in TOO_LARGE]


def _text_column(schema):
    fields = [field.name for field in schema if is_text(field.type)]
    preferred = [name for name in ("text", "content", "body", "body.text (raw)") if name in fields]
    return next(iter([*preferred, *fields]), None)


def _check(path, run_job):
    before = pq.read_table(path, partitioning=None)
    column = _text_column(before.schema)
    if column is None:
        with pytest.raises(InvalidValueError, match=r"No file has a column 'text'"):
            run_job(path)
        return
    job = run_job(path, text_column=f'"{column}"' if "." in column else column)

    after = job.table()
    assert after.num_rows == before.num_rows == job.report.rows_out
    kept = after.select(before.schema.names)
    # All but "not null", which rows that cannot be decoded could not keep.
    assert kept.schema.types == before.schema.types
    assert str(kept.to_pylist()) == str(before.to_pylist())
    assert after["_source_row"].to_pylist() == list(range(before.num_rows))
    assert set(job.report.errors_by_code) <= {
        "null_document",
        "empty_document",
        "invalid_utf8",
        "invalid_text",
    }


@pytest.mark.parametrize("path", _files("text_docs"))
def test_our_files_of_other_writers_pass_unchanged(path, run_job):
    _check(path, run_job)


@pytest.mark.parametrize("path", _files("public"))
def test_public_files_pass_unchanged(path, run_job):
    _check(path, run_job)


@pytest.mark.parametrize("path", _files("public_bad"))
def test_damaged_public_files_are_refused_or_give_one_row_per_row(path, run_job):
    try:
        schema = pq.read_schema(path)
    except OSError:
        with pytest.raises(InvalidValueError, match=path.name):
            run_job(path)
        return
    column = _text_column(schema)
    if column is None:
        with pytest.raises(InvalidValueError, match="available are"):
            run_job(path)
        return
    job = run_job(path, text_column=column)
    assert job.table().num_rows == pq.read_metadata(path).num_rows == job.report.rows_out


def test_a_hive_partitioned_folder_is_read_whole(run_job):
    if not ZOO.is_dir():
        pytest.skip(f"the shared files are not at {ZOO}")
    job = run_job(ZOO / "text_docs" / "hive_partitioned")

    assert {row["_source_file"] for row in job.rows()} == {
        "lang=en/part-0.parquet",
        "lang=xx/part-0.parquet",
    }
    assert job.report.rows_out == 7
