"""Publicly reported ways in which batch jobs over Parquet go wrong, each with our behaviour."""

import json
import os
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orthros_service.errors import InvalidValueError

CASES = Path(__file__).parents[4] / "shared" / "cases" / "batch_cases.jsonl"


@pytest.fixture
def case(request, tmp_path):
    """Write the input of a case and return its folder."""
    if not CASES.is_file():
        pytest.skip(f"the shared cases are not at {CASES}")
    cases = {row["id"]: row for row in map(json.loads, CASES.read_text().splitlines())}
    folder = tmp_path / "case"
    folder.mkdir()
    with warnings.catch_warnings():
        # Some of them leave it to the interpreter to close what they open.
        warnings.simplefilter("ignore", ResourceWarning)
        exec(cases[request.param]["input"], {"pa": pa, "pq": pq, "os": os, "P": str(folder)})
    return folder


def for_case(name):
    return pytest.mark.parametrize("case", [name], indirect=True)


def _codes(job):
    return {row["id"]: row["error_code"] for row in job.rows()}


@for_case("B01-success-marker")
def test_markers_and_foreign_files_are_skipped_and_counted(case, run_job):
    report = run_job(case).report
    assert (report.rows_out, report.rows_ok, report.files_skipped) == (2, 2, 3)


@for_case("B02-nested-temporary")
def test_leftovers_of_dead_tasks_are_not_read(case, run_job):
    rows = run_job(case).rows()
    assert [row["_source_file"] for row in rows] == ["y=1/a.parquet"] * 2


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("B04-garbage-file", "not_parquet"),
        ("B05-truncated-file", "truncated"),
        ("B59-encrypted", "encrypted"),
    ],
    indirect=["case"],
)
def test_a_bad_file_is_refused_by_name_or_left_out_on_request(case, reason, run_job):
    with pytest.raises(InvalidValueError, match=r"b\.parquet"):
        run_job(case)

    report = run_job(case, skip_bad_files=True).report
    assert report.rows_ok == report.rows_out == pq.read_metadata(case / "a.parquet").num_rows
    assert [(bad.path, bad.reason) for bad in report.bad_files] == [("b.parquet", reason)]
    assert not report.is_complete


@for_case("B07-zero-row-files")
def test_zero_rows_leave_one_readable_file_and_the_marker(case, run_job):
    job = run_job(case)
    assert job.table().num_rows == 0
    assert {"id", "text", "answer", "_source_file"} <= set(job.table().schema.names)
    assert (job.output / "_SUCCESS").is_file()


@for_case("B08-zero-row-first-null-type")
def test_a_null_typed_text_column_in_one_file_gives_null_documents(case, run_job):
    assert _codes(run_job(case)) == {"a": "null_document", "b": None}


@for_case("B10-empty-dir")
def test_an_empty_folder_is_refused(case, run_job):
    with pytest.raises(InvalidValueError, match="no Parquet files"):
        run_job(case / "empty")


@for_case("B11-path-specials")
def test_folders_with_special_names_work_as_input_and_as_output(case, run_job, tmp_path):
    names = {f"{path.name}/f.parquet" for path in case.iterdir()}
    assert {row["_source_file"] for row in run_job(case).rows()} == names
    for path in case.iterdir():
        job = run_job(path, output=str(tmp_path / "out" / path.name))
        assert job.table().num_rows == 1
        assert job.output.name == path.name


@for_case("B13-path-column-clash")
def test_columns_named_as_other_systems_name_theirs_survive(case, run_job):
    (row,) = run_job(case).rows()
    assert (row["path"], row["row_hash"]) == ("orig", "mine")


@pytest.mark.parametrize(
    "case", ["B14-dict-vs-string", "B17-string-vs-large-string"], indirect=True
)
def test_mixed_string_types_become_large_string(case, run_job):
    job = run_job(case)
    assert job.report.rows_ok == 2
    assert job.table().schema.field("text").type == pa.large_string()


@for_case("B16-missing-column")
def test_a_text_column_absent_in_one_file_costs_only_its_rows(case, run_job):
    job = run_job(case)
    assert _codes(job) == {"a": None, "b": "null_document", "c": None}
    assert [warning.split()[0] for warning in job.report.warnings] == ["b.parquet"]


@for_case("B19-dup-column-names")
def test_a_column_that_occurs_twice_is_refused(case, run_job):
    with pytest.raises(InvalidValueError, match=r"'text' occurs twice in a\.parquet"):
        run_job(case)


@for_case("B20-nested-text-path")
def test_a_dotted_name_with_two_meanings_is_refused_and_quotes_decide(case, run_job):
    with pytest.raises(InvalidValueError, match="both a column and a field"):
        run_job(case, text_column="doc.body.text")
    (row,) = run_job(case, text_column='"doc.body.text"').rows()
    assert row["answer"] == "What? -> flat"
    assert row["doc"] == {"body": {"text": "deep", "pages": [["p1"], []]}}


@for_case("B22-offset-overflow")
def test_large_documents_are_never_gathered_in_one_chunk(case, run_job):
    job = run_job(case, chunk_bytes=1024 * 1024)
    assert job.report.rows_ok == 2
    assert job.report.files_out == 2


@for_case("B23-one-huge-document")
def test_a_document_over_the_limit_is_an_error_with_its_size(case, run_job):
    job = run_job(case, max_document_bytes=16 * 1024 * 1024)
    assert _codes(job) == {"big": "document_too_large", "ok": None}
    assert "20,971,520" in next(row["error_message"] for row in job.rows() if row["id"] == "big")


@for_case("B25-silent-truncation")
def test_the_engine_gets_the_whole_document(case, run_job, backend):
    run_job(case)
    assert backend.requests[0].documents[0].text.endswith("The secret code is 7291.")


@for_case("B26-single-token-run")
def test_long_runs_of_one_character_are_rows_like_others(case, run_job):
    assert run_job(case).report.rows_ok == 3


@for_case("B28-empty-documents")
def test_empty_documents_never_reach_the_engine(case, run_job, backend):
    assert _codes(run_job(case)) == {
        "n": "null_document",
        "e": "empty_document",
        "w": "empty_document",
        "z": "empty_document",
        "ok": None,
    }
    assert len(backend.requests) == 1


@for_case("B29-bad-utf8")
def test_bytes_that_are_not_utf8_cost_their_row_and_the_output_is_valid(case, run_job):
    job = run_job(case)
    assert _codes(job) == {"x": "invalid_utf8", "y": None}
    job.table().validate(full=True)


@for_case("B31-nul-characters")
def test_nul_characters_are_refused_and_kept_in_their_column(case, run_job):
    job = run_job(case)
    assert _codes(job) == {"a": "invalid_text", "b": "invalid_text"}
    assert [row["text"] for row in job.rows()] == ["x\0y\0", "\0"]


@for_case("B32-lone-surrogate-output")
def test_half_a_character_in_an_answer_is_replaced(case, run_job, backend):
    backend.answer = lambda request: "bad\ud83d"
    job = run_job(case)
    assert [row["answer"] for row in job.rows()] == ["bad\ufffd"]
    assert job.table().schema.field("answer").type == pa.large_string()


@for_case("B34-hidden-unicode")
def test_hidden_characters_are_counted_and_texts_left_as_they_are(case, run_job):
    job = run_job(case)
    before = {row["id"]: row["text"] for row in pq.read_table(case / "a.parquet").to_pylist()}
    assert {row["id"]: row["text"] for row in job.rows()} == before
    assert (job.report.rows_ok, job.report.rows_with_hidden_characters) == (2, 2)


@for_case("B35-crlf")
def test_line_ends_do_not_matter_and_offsets_are_those_of_the_row(case, run_job, backend):
    job = run_job(case)
    assert len({request.documents[0].text for request in backend.requests}) == 1
    for row in job.rows():
        (citation,) = row["citations"]
        assert row["text"][citation["start_char"] : citation["end_char"]] == citation["quote"]


@for_case("B37-duplicate-ids")
def test_repeated_ids_lose_no_row(case, run_job):
    report = run_job(case, id_column="id").report
    assert (report.rows_out, report.ids.repeated, report.ids.nulls) == (16, 8, 0)


@for_case("B38-null-ids")
def test_null_ids_stay_null(case, run_job):
    job = run_job(case, id_column="id")
    assert (job.report.rows_out, job.report.ids.nulls) == (16, 8)
    assert [row["id"] for row in job.rows()][1::2] == [None] * 8


@for_case("B40-questions-list")
def test_a_list_of_questions_is_refused_before_work(case, run_job):
    with pytest.raises(InvalidValueError, match="question column 'questions' has type list"):
        run_job(case, question_column="questions")


@for_case("B43-output-schema-drift")
def test_files_with_and_without_errors_have_one_schema(case, run_job):
    job = run_job(case, chunk_rows=1)
    schemas = [pq.read_schema(path) for path in job.output.glob("part-*.parquet")]
    assert len(schemas) >= 1
    assert all(schema.equals(schemas[0]) for schema in schemas)
    assert job.table().num_rows == 4


@for_case("B44-one-bad-row-drops-block")
def test_a_row_that_raises_costs_only_itself(case, run_job):
    report = run_job(case).report
    assert (report.rows_out, report.errors_by_code) == (1000, {"engine_error": 1})


@for_case("B46-resubmit-after-success")
def test_a_second_run_into_the_same_folder_is_refused_and_changes_nothing(case, run_job):
    job = run_job(case)
    with pytest.raises(InvalidValueError, match="not empty"):
        run_job(case, output=str(job.output))
    assert job.table().num_rows == 2


@for_case("B55-output-equals-input")
def test_an_output_at_or_inside_the_input_is_refused(case, run_job):
    for output in (case, case / "out", case.parent):
        with pytest.raises(InvalidValueError):
            run_job(case, output=str(output))
    assert pq.read_table(case / "a.parquet").num_rows == 1


@for_case("B56-output-exists")
def test_an_output_that_holds_another_runs_files_is_refused(case, run_job):
    with pytest.raises(InvalidValueError, match="not empty"):
        run_job(case / "a.parquet", output=str(case / "out"))
    assert (case / "out" / "old.parquet").is_file()


@for_case("B58-row-hash-filter")
def test_the_identity_of_a_row_is_its_place_in_the_file(case, run_job):
    rows = run_job(case).rows()
    assert [(row["id"], row["_source_row"]) for row in rows] == [("a", 0), ("b", 1)]
