"""What is wrong with a job is said before it starts, with the names of files and columns."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orthros_service.errors import InvalidValueError
from orthros_service.jobs.plan import make_plan
from orthros_service.jobs.spec import build_spec


def _plan(source: Path, **values):
    values.setdefault("output", str(source.parent / "out"))
    values.setdefault("question", "What?")
    return make_plan(build_spec(input=str(source), **values))


def _refusal(source: Path, **values) -> str:
    with pytest.raises(InvalidValueError) as refused:
        _plan(source, **values)
    return refused.value.message


def test_a_folder_without_parquet_is_refused_with_the_number_of_files_seen(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "README.md").write_text("read me")

    message = _refusal(folder)
    assert str(folder) in message
    assert "1 file(s) seen" in message


def test_bad_files_are_refused_by_name_and_left_out_only_on_request(write, tmp_path):
    folder = write(text=["x", "y"])
    (folder / "garbage.parquet").write_text("not parquet")
    data = bytearray((folder / "a.parquet").read_bytes())
    data[-20:-8] = b"\xff" * 12
    (folder / "footer.parquet").write_bytes(bytes(data))

    message = _refusal(folder)
    assert "garbage.parquet" in message
    assert "footer.parquet" in message
    assert "--skip-bad-files" in message

    plan = _plan(folder, skip_bad_files=True)
    assert [file.path for file in plan.files] == ["a.parquet"]
    assert {bad.path: bad.reason for bad in plan.bad_files} == {
        "garbage.parquet": "not_parquet",
        "footer.parquet": "unreadable",
    }


def test_only_bad_files_are_no_input_even_when_they_may_be_skipped(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.parquet").write_text("not parquet")

    assert "no Parquet files" in _refusal(tmp_path / "in", skip_bad_files=True)


def test_a_missing_text_column_names_the_columns_there_and_the_closest(write):
    message = _refusal(write(id=["a"], Text=["x"]))

    assert "'id', 'Text'" in message
    assert "Did you mean 'Text'?" in message


@pytest.mark.parametrize(
    "values",
    [
        [1],
        [["a paragraph"]],
        [{"text": "x"}],
        pa.nulls(1),
        [True],
        pa.array([["x"]], pa.large_list(pa.string())),
    ],
)
def test_a_text_column_that_cannot_hold_text_is_refused_with_its_type(write, values):
    message = _refusal(write(body=["x"], text=values))

    assert "'text' has type" in message
    assert "'body'" in message


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["x"], pa.string()),
        pa.array(["x"], pa.large_string()),
        pa.array(["x"], pa.string_view()),
        pa.array(["x"]).dictionary_encode(),
        pa.array(["x"], pa.large_string()).dictionary_encode(),
        pa.array([b"x"], pa.binary()),
        pa.array([b"x"], pa.binary_view()),
        pa.array([b"x"], pa.large_binary()),
        pa.array([b"x"], pa.binary(1)),
    ],
)
def test_every_text_like_type_is_answered_and_keeps_its_type(write, run_job, values):
    folder = write(text=values)

    job = run_job(folder)

    assert job.report.rows_ok == 1
    assert job.rows()[0]["answer"] == "What? -> x"
    # As pyarrow reads it: a dictionary of large strings comes back as one of strings.
    before = pq.read_schema(folder / "a.parquet").field("text").type
    assert job.table().schema.field("text").type == before


def test_the_question_column_is_checked_as_the_text_column_is(write):
    folder = write(text=["x"], ask=[["several", "questions"]])

    missing = _refusal(folder, question=None, question_column="asks")
    assert "Did you mean 'ask'?" in missing
    assert "question column 'ask' has type" in _refusal(
        folder, question=None, question_column="ask"
    )
    assert "'gone'" in _refusal(folder, id_column="gone")


def test_a_dotted_name_is_a_field_and_a_quoted_one_a_column(tmp_path):
    (tmp_path / "in").mkdir()
    document = {"body": {"text": "deep", "pages": [["p1"], []]}}
    table = pa.table({"id": ["a"], "doc": [document], "doc.body.text": ["flat"]})
    pq.write_table(table, tmp_path / "in" / "both.parquet")

    assert "rename one" in _refusal(tmp_path / "in", text_column="doc.body.text")
    quoted = _plan(tmp_path / "in", text_column='"doc.body.text"')
    assert quoted.text.read_bytes(table).to_pylist() == [b"flat"]

    nested = table.drop_columns(["doc.body.text"])
    pq.write_table(nested, tmp_path / "in" / "both.parquet")
    plan = _plan(tmp_path / "in", text_column="doc.body.text")
    assert plan.text.read_bytes(nested).to_pylist() == [b"deep"]


def test_a_null_parent_makes_a_nested_document_null(write, run_job):
    source = write(doc=pa.array([{"text": "deep"}, None, {"text": None}]))

    job = run_job(source, text_column="doc.text")

    assert [row["error_code"] for row in job.rows()] == [None, "null_document", "null_document"]
    assert [row["doc"] for row in job.rows()] == [{"text": "deep"}, None, {"text": None}]


def test_a_column_that_occurs_twice_is_refused_with_its_file(tmp_path):
    (tmp_path / "in").mkdir()
    arrays = [pa.array(["a"]), pa.array(["x"]), pa.array(["y"])]
    twice = pa.Table.from_arrays(arrays, names=["id", "text", "text"])
    pq.write_table(twice, tmp_path / "in" / "twice.parquet")

    assert "'text' occurs twice in twice.parquet" in _refusal(tmp_path / "in")


def test_columns_that_the_job_would_add_are_refused_and_similar_ones_survive(write, run_job):
    assert "'status', 'answer'" in _refusal(write(text=["x"], answer=["y"], status=["z"]))

    job = run_job(write(text=["x"], path=["orig"], row_hash=["mine"], unit=[1], chunk=[2]))
    (row,) = job.rows()
    assert (row["path"], row["row_hash"], row["unit"], row["chunk"]) == ("orig", "mine", 1, 2)
    assert row["_source_file"] == "a.parquet"


def test_an_output_that_is_or_lies_inside_the_input_is_refused(write, tmp_path):
    folder = write(text=["x"])
    (tmp_path / "link").symlink_to(folder)

    for output in (folder, folder / "out", tmp_path / "link" / "out"):
        assert "inside the input" in _refusal(folder, output=str(output))
    file = folder / "a.parquet"
    assert "inside the input" in _refusal(file, output=str(file))
    # The parent of the input holds the input.
    assert "not empty" in _refusal(folder, output=str(tmp_path))


def test_an_output_that_holds_anything_is_refused(write, tmp_path):
    folder = write(text=["x"])
    output = tmp_path / "out"
    output.mkdir()
    assert _plan(folder, output=str(output)).num_rows == 1

    (output / "old.parquet").touch()
    assert "not empty" in _refusal(folder, output=str(output))
    assert "is a file" in _refusal(folder, output=str(output / "old.parquet"))
    assert "URI" in _refusal(folder, output="s3://bucket/out")


def test_the_output_of_an_interrupted_job_is_told_from_a_finished_one(write, tmp_path):
    folder = write(text=["x"])
    output = tmp_path / "out"
    (output / "_job" / "tmp").mkdir(parents=True)
    # Nothing was answered yet: nothing is lost.
    assert _plan(folder, output=str(output)).num_rows == 1
    (output / "part-0.parquet").touch()
    refusal = _refusal(folder, output=str(output))
    assert "1 file(s) of a job that was interrupted" in refusal
    assert "Delete the folder" in refusal
    (output / "_SUCCESS").touch()
    assert "a finished job" in _refusal(folder, output=str(output))


def test_a_limit_takes_the_first_rows_and_changes_no_identity(write, run_job):
    write("a.parquet", text=[f"a{i}" for i in range(10)], row_group_size=4)
    folder = write("b.parquet", text=[f"b{i}" for i in range(10)], row_group_size=4)

    everything = {
        (row["_source_file"], row["_source_row"]): row["text"] for row in run_job(folder).rows()
    }
    job = run_job(folder, limit=13)

    limited = {(row["_source_file"], row["_source_row"]): row["text"] for row in job.rows()}
    assert list(limited.values()) == [f"a{i}" for i in range(10)] + ["b0", "b1", "b2"]
    assert limited.items() <= everything.items()
    assert job.report.rows_in == job.report.rows_out == 13


def test_many_tiny_files_become_few_units_and_a_large_group_stays_whole(write):
    for index in range(100):
        folder = write(f"{index:03}.parquet", text=["x"])
    folder = write("large.parquet", text=["y"] * 1000)

    plan = _plan(folder, chunk_rows=64)

    assert [sum(each.num_rows for each in unit.ranges) for unit in plan.units] == [64, 36, 1000]
    assert plan.num_rows == 1100


def test_a_column_absent_in_one_file_is_a_warning_and_gives_error_rows_that_say_so(write, run_job):
    write("a.parquet", id=["a"], text=["x"])
    write("b.parquet", id=["b"])
    folder = write("c.parquet", extra=[1], text=["z"], id=["c"])

    job = run_job(folder)

    assert job.plan.warnings == ("b.parquet has no column 'text'; its rows become error rows.",)
    rows = {row["id"]: row for row in job.rows()}
    assert [rows[name]["status"] for name in "abc"] == ["ok", "error", "ok"]
    assert rows["b"]["error_code"] == "null_document"
    assert "'text' is absent in this file" in rows["b"]["error_message"]
