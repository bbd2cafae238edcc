"""The commands against a service on a real socket: what they print, and where."""

import json
import re

import pytest

from orthros_client.types import Answer, Document, DocumentDeleted, DocumentList, TokenCount

ATTACK = "\x1b[31m\x07[bold]x[/bold]\u202e"
SHOWN = "\\x1b[31m\\x07[bold]x[/bold]\\u202e"


def _progress(wire, done, status):
    prefill = {"mode": "linear", "tokens_done": done, "tokens_total": 1000, "tokens_per_s": 2500.0}
    return wire.document(status, num_tokens=1000, prefill=prefill)


def test_ingest_prints_the_id_alone_and_progress_beside_it(run, service, wire, text_file):
    service.progress = [
        wire.document("queued", prefill={"tokens_done": 0}),
        _progress(wire, 400, "ingesting"),
        _progress(wire, 1000, "ready"),
    ]
    result = run("ingest", text_file, "--mode", "linear")
    assert (result.exit_code, result.stdout) == (0, "doc_1\n")
    assert "reading: 1,000 of 1,000 tokens, 2,500 tokens/s" in result.stderr
    assert "Ready: 1,000 tokens, 40 characters, linear mode" in result.stderr
    assert service.body("/v1/documents") == {
        "text": "Call me Ishmael.",
        "title": "moby.txt",
        "prefill_mode": "linear",
    }


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(run, service, wire, text_file, monkeypatch):
    # What rich asks for to treat standard error as a terminal.
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    service.progress = [_progress(wire, 400, "ingesting"), _progress(wire, 1000, "ready")]
    result = run("ingest", text_file)
    assert (result.exit_code, result.stdout) == (0, "doc_1\n")
    assert "reading" in result.stderr
    assert "1,000 of 1,000 tokens, 2,500 tokens/s" in result.stderr
    assert "reading:" not in result.stderr
    assert result.stderr.endswith(
        "Ready: 1,000 tokens, 40 characters, linear mode, 2,500 tokens/s.\n"
    )


def test_quiet_leaves_nothing_but_the_result(run, service, text_file):
    result = run("ingest", text_file, "--quiet", "--title", "Mine")
    assert (result.stdout, result.stderr) == ("doc_1\n", "")
    assert service.body("/v1/documents")["title"] == "Mine"


def test_no_wait_returns_at_once(run, service, text_file):
    result = run("ingest", text_file, "--no-wait", "--json")
    assert json.loads(result.stdout)["status"] == "queued"
    assert [path for _, path, _ in service.requests] == ["/v1/documents"]


def test_standard_input_is_a_file_without_a_title(run, service):
    assert run("ingest", "-", "-q", stdin="Über".encode()).exit_code == 0
    assert service.body("/v1/documents") == {"text": "Über", "prefill_mode": "auto"}


def test_an_answer_is_shown_with_numbered_citations_model_and_timings(run, service):
    service.answer["citations"] = [
        {
            "document_id": "doc_1",
            "start_char": 8,
            "end_char": 15,
            "quote": "Ishmael\nagain",
            "answer_start": 0,
            "answer_end": 7,
            "score": 0.9,
        }
    ]
    service.answer["warnings"] = ["The document was read in linear mode."]
    result = run("ask", "Who?", "-d", "doc_1", "--max-tokens", "9", "--seed", "1")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "Ishmael."
    assert lines[2] == '[1] doc_1 8-15: "Ishmael again"'
    assert "tiny (converted: false), 10 document + 5 prompt + 3 written tokens" in result.stdout
    assert "total 0.50 s" in result.stdout
    assert "Warning: The document was read in linear mode." in result.stdout
    assert service.body("/v1/answers") == {
        "question": "Who?",
        "document_ids": ["doc_1"],
        "citations": True,
        "max_tokens": 9,
        "seed": 1,
        "stream": True,
    }


def test_a_converted_model_needs_no_note(run, service):
    service.answer["converted"] = True
    assert "Note:" not in run("ask", "Who?", "-d", "doc_1").stdout


def test_quiet_answers_are_the_answer_alone(run):
    assert run("ask", "Who?", "-d", "doc_1", "-q").stdout == "Ishmael.\n"


def test_asking_a_file_uploads_it_waits_and_names_it(run, service, text_file):
    result = run("ask", "Who?", "--file", text_file, "--no-citations", "--timeout", "30")
    assert result.exit_code == 0
    assert "Stored as doc_1; ask again with --document doc_1." in result.stderr
    paths = [path for _, path, _ in service.requests]
    assert paths == ["/v1/documents", "/v1/documents/doc_1/events", "/v1/answers"]
    body = service.body("/v1/answers")
    assert (body["citations"], body["deadline_s"]) == (False, 30.0)


def test_a_summary_takes_its_own_options(run, service):
    result = run("summarize", "-d", "a", "-d", "b", "--style", "bullets", "--focus", "costs")
    assert result.exit_code == 0
    body = service.body("/v1/summaries")
    assert (body["document_ids"], body["style"], body["focus"]) == (["a", "b"], "bullets", "costs")


@pytest.mark.parametrize(
    ("arguments", "wire_type"),
    [
        (("ingest", "FILE"), Document),
        (("ask", "Who?", "-d", "doc_1"), Answer),
        (("summarize", "--file", "FILE"), Answer),
        (("count", "FILE"), TokenCount),
        (("documents", "list"), DocumentList),
        (("documents", "get", "doc_1"), Document),
        (("documents", "delete", "doc_1"), DocumentDeleted),
    ],
)
def test_json_output_is_one_object_of_the_wire_type(run, text_file, arguments, wire_type):
    arguments = [text_file if argument == "FILE" else argument for argument in arguments]
    result = run(*arguments, "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    wire_type.model_validate(json.loads(result.stdout))
    assert set(json.loads(result.stdout)) == set(wire_type.model_fields)


def test_texts_of_the_service_cannot_act_on_the_terminal(run, service, wire):
    service.deltas = ["\x1b", "[31m\x07[bold]x[/bold]\u202e"]
    service.answer |= {
        "text": ATTACK,
        "model": ATTACK,
        "warnings": [ATTACK],
        "citations": [
            {
                "document_id": ATTACK,
                "start_char": 0,
                "end_char": 1,
                "quote": ATTACK,
                "answer_start": 0,
                "answer_end": 1,
                "score": 1.0,
            }
        ],
    }
    document = wire.document(title=ATTACK, id=ATTACK, metadata={ATTACK: ATTACK})
    service.documents = [{**document, "error": {"code": "x", "message": ATTACK}}]
    for arguments in (
        ("ask", "Who?", "-d", "doc_1"),
        ("documents", "list"),
        ("documents", "get", "doc_1"),
    ):
        output = run(*arguments)
        assert output.exit_code == 0
        assert SHOWN in output.stdout
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", output.output)


def test_a_documents_list_says_when_there_is_more(run, service, wire):
    service.documents = [wire.document(id=f"doc_{number}") for number in range(3)]
    result = run("documents", "list", "--limit", "2")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["doc_0", "doc_1"]
    assert "more than 2" in result.stderr
    listed = json.loads(run("documents", "list", "--limit", "2", "--json").stdout)
    assert (len(listed["data"]), listed["has_more"]) == (2, True)
    service.documents = []
    empty = run("documents", "list")
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert "no documents" in empty.stderr


def test_count_names_tokens_and_mode(run, text_file):
    line = "1,234 tokens, 5,678 characters; as a document 1,260 tokens, read in full mode\n"
    assert run("count", text_file).stdout == line
