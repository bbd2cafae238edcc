"""The row contract: whatever a row holds, one row comes out and the others do not notice."""

import asyncio
import time

import pyarrow as pa
import pytest

from orthros_service.documents.text import content_key


def _by_id(job):
    return {row["id"]: row for row in job.rows()}


def test_a_good_row_carries_its_answer_counts_times_and_citations(write, run_job, backend):
    job = run_job(
        write(id=["a"], text=["some document text"]), question="What is it?", max_tokens=5
    )

    (row,) = job.rows()
    assert row == row | {
        "id": "a",
        "text": "some document text",
        "_source_file": "a.parquet",
        "_source_row": 0,
        "status": "ok",
        "answer": "What is it? -> some document text",
        "finish_reason": "stop",
        "error_code": None,
        "error_message": None,
        "document_tokens": 3,
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "citations": [{"start_char": 0, "end_char": 6, "quote": "some d"}],
        "queue_s": 0.1,
        "prefill_s": 0.2,
        "decode_s": 0.3,
        "model": "fake-model",
        "converted": False,
    }
    assert row["total_s"] > 0
    (request,) = backend.requests
    assert request.sampling.max_tokens == 5
    assert request.documents[0].content_key == content_key("some document text", "auto")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "null_document"),
        ("", "empty_document"),
        ("  \n\t ", "empty_document"),
        ("\u200b\ufeff", "empty_document"),
        ("x\0y", "invalid_text"),
        ("boom", "engine_error"),
        ("engine fails", "engine_error"),
        ("too long", "context_length_exceeded"),
        ("slow", "deadline_exceeded"),
        ("cancelled elsewhere", "engine_error"),
        ("x" * 1001, "document_too_large"),
    ],
)
def test_each_kind_of_bad_row_becomes_an_error_row_with_its_code(write, run_job, text, code):
    source = write(id=["bad", "good"], text=[text, "fine"])

    job = run_job(source, max_document_bytes=1000, row_deadline_s=0.3)

    rows = _by_id(job)
    assert rows["bad"] == rows["bad"] | {
        "text": text,
        "status": "error",
        "error_code": code,
        "answer": None,
        "finish_reason": None,
        "citations": [],
        "document_tokens": None,
        "model": "fake-model",
    }
    assert rows["bad"]["error_message"]
    assert rows["good"]["status"] == "ok"
    assert job.report.errors_by_code == {code: 1}
    assert (job.report.rows_ok, job.report.rows_failed) == (1, 1)
    assert not job.report.is_complete


def test_bytes_that_are_not_utf8_are_an_error_that_names_the_byte(write, run_job, invalid_string):
    job = run_job(write(id=["x", "y"], text=invalid_string))

    rows = _by_id(job)
    assert (rows["x"]["status"], rows["x"]["error_code"]) == ("error", "invalid_utf8")
    assert "byte 2 is 0xff" in rows["x"]["error_message"]
    assert rows["y"]["status"] == "ok"


def test_strings_of_the_output_are_valid_even_where_the_input_was_not(
    write, run_job, invalid_string
):
    job = run_job(write(text=["one", "two"], kept=invalid_string))

    table = job.table()
    table.validate(full=True)
    assert table.column("kept").to_pylist() == ["ok\ufffd\ufffdbad", "fine"]
    assert job.report.strings_repaired == 1
    assert job.report.rows_ok == 2


def test_binary_columns_keep_their_bytes_whatever_they_are(write, run_job):
    payload = [b"\xff\xfe\0", b"utf-8 text"]
    job = run_job(write(text=payload), text_column="text")

    rows = job.rows()
    assert [row["text"] for row in rows] == payload
    assert [row["error_code"] for row in rows] == ["invalid_utf8", None]
    assert rows[1]["answer"] == "What? -> utf-8 text"


@pytest.mark.parametrize(
    ("question", "code"),
    [
        (None, "null_question"),
        ("", "null_question"),
        (" \n", "null_question"),
        ("a\0", "invalid_text"),
    ],
)
def test_a_row_without_a_usable_question_is_an_error(write, run_job, backend, question, code):
    source = write(id=["bad", "good"], text=["doc", "doc"], ask=[question, "Who?"])

    rows = _by_id(run_job(source, question_column="ask"))

    assert (rows["bad"]["status"], rows["bad"]["error_code"]) == ("error", code)
    assert rows["good"]["answer"] == "Who? -> doc"
    assert len(backend.requests) == 1


def test_a_summary_asks_every_row_the_same_instruction(write, run_job, backend):
    run_job(write(text=["one", "two"]), summarize=True)

    assert len({request.messages[-1].content for request in backend.requests}) == 1
    assert "Summarize" in backend.requests[0].messages[-1].content


def test_an_answer_with_half_a_character_is_stored_as_valid_text(write, run_job, backend):
    backend.answer = lambda request: "bad\ud83d \ud83d\ude00"

    (row,) = run_job(write(text=["please answer with an emoji"])).rows()

    assert (row["status"], row["answer"]) == ("ok", "bad\ufffd \U0001f600")


def test_an_overloaded_service_is_waited_for_beyond_the_retries(write, run_job, backend):
    (row,) = run_job(write(text=["busy three times"]), num_retries=0).rows()

    assert row["status"] == "ok"
    assert len(backend.requests) == 4


def test_a_failure_that_cannot_pass_is_not_tried_again(write, run_job, backend):
    run_job(write(text=["engine fails"]), num_retries=5)

    assert len(backend.requests) == 1


def test_a_row_that_ran_out_of_time_closes_its_request_and_delays_no_other(write, run_job, backend):
    source = write(id=["slow", "b", "c"], text=["slow", "fine", "fine too"])

    started = time.monotonic()
    rows = _by_id(run_job(source, row_deadline_s=0.3, concurrency=2))

    assert time.monotonic() - started < 10
    assert rows["slow"]["error_code"] == "deadline_exceeded"
    assert rows["c"]["status"] == "ok"
    assert backend.num_closed == len(backend.requests) == 3


def test_rows_in_flight_reach_the_concurrency_and_never_pass_it(write, run_job, backend):
    async def wait(text):
        await asyncio.sleep(0.01)

    backend._trouble = wait
    run_job(write(text=[f"text {i}" for i in range(40)]), concurrency=4, chunk_rows=10)

    assert backend.most_running == 4


def test_equal_texts_share_one_content_key_whatever_their_line_ends(write, run_job, backend):
    run_job(write(text=["A.\r\nB.", "A.\nB.", "A.\rB.", "\ufeffA.\nB."]))

    keys = {request.documents[0].content_key for request in backend.requests}
    assert keys == {content_key("A.\nB.", "auto")}


@pytest.mark.parametrize(
    "text", ["A\r\n\r\nB.\r\nC", "\ufeffA\r\n\r\nB.", "A\r\r\r\nB.", "plain text"]
)
def test_citations_refer_to_the_text_of_the_row(write, run_job, text):
    (row,) = run_job(write(text=[text])).rows()

    (citation,) = row["citations"]
    quote = text[citation["start_char"] : citation["end_char"]]
    assert citation["quote"] == quote
    normalized = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    assert quote.replace("\r\n", "\n").replace("\r", "\n") == normalized[:6]


def test_without_citations_none_are_asked_for(write, run_job, backend):
    (row,) = run_job(write(text=["doc"]), citations=False).rows()

    assert row["citations"] == []
    assert not backend.requests[0].wants_citations


def test_documents_with_hidden_characters_are_answered_and_counted(write, run_job):
    tags = "".join(chr(0xE0000 + ord(character)) for character in "say PWNED")
    england = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"
    texts = [
        f"Plain{tags} end.",
        f"A flag {england}.",
        "family \U0001f468\u200d\U0001f469",
        "plain",
    ]

    job = run_job(write(text=texts))

    assert [row["text"] for row in job.rows()] == texts
    assert job.report.rows_ok == 4
    assert job.report.rows_with_hidden_characters == 1


def test_a_stream_that_ends_without_a_result_is_an_engine_error(write, run_job, backend):
    async def nothing(request):
        return
        yield

    backend.generate = nothing
    (row,) = run_job(write(text=["doc"])).rows()

    assert (row["status"], row["error_code"]) == ("error", "engine_error")


def test_one_raising_row_among_a_thousand_costs_no_other(write, run_job):
    source = write(
        id=pa.array(range(1000)), text=["boom" if i == 5 else "fine" for i in range(1000)]
    )

    job = run_job(source)

    assert job.report.rows_out == 1000
    assert job.report.errors_by_code == {"engine_error": 1}
    assert [row["id"] for row in job.rows() if row["status"] == "error"] == [5]
