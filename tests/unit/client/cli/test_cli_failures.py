"""What goes wrong ends with its exit code and says what to do."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import typer
from typer.testing import CliRunner

from orthros_client.cli import app, register

ASK = ("ask", "Who?", "-d", "doc_1")


def test_a_refusal_is_told_with_code_request_and_remedy(run, service):
    service.refuse("not_found", 404, detail="There is no document doc_1.")
    result = run(*ASK)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "Error: There is no document doc_1.",
        "  code: not_found, HTTP status: 404, request: req_1",
        "  The command `documents list` shows the documents that exist.",
    ]


def test_a_refusal_as_json_is_one_object_too(run, service):
    service.refuse("engine_error", 500, phase="decode")
    result = run("documents", "get", "doc_1", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "object": "error",
        "code": "engine_error",
        "message": "What was wrong with engine_error.",
        "status": 500,
        "phase": "decode",
        "request_id": "req_1",
        "retryable": False,
        "retry_after_s": None,
        "exit_code": 1,
    }
    assert "phase: decode" in result.stderr


def test_an_overloaded_service_names_the_wait(run, service, text_file):
    service.refuse("overloaded", 429, retryable=True, retry_after="90")
    result = run("count", text_file)
    assert result.exit_code == 1
    assert "Run the command again in 90 s." in result.stderr


def test_a_message_of_the_service_cannot_act_on_the_terminal(run, service):
    service.refuse("x\x1b", 400, detail="\x1b[2J[red]", request_id="\x07")
    result = run("documents", "get", "doc_1")
    assert "\\x1b[2J[red]" in result.stderr
    assert not {"\x1b", "\x07"} & set(result.output)


def test_a_broken_stream_shows_what_came_and_fails(run, service):
    service.is_broken = True
    result = run(*ASK)
    assert (result.exit_code, result.stdout) == (1, "Ishmael.\n")
    assert "stream_broken" in result.stderr


def test_a_failed_ingestion_fails_the_command(run, service, wire, text_file):
    error = {"code": "document_too_large", "message": "It has too many tokens."}
    service.progress = [wire.document("failed", error=error)]
    result = run("ask", "Who?", "--file", text_file)
    assert result.exit_code == 1
    assert "too many tokens" in result.stderr
    assert "code: document_too_large" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ask", "Who?"), "--document ID"),
        (("ask", "Who?", "-d", "x", "-f", "y"), "--document ID"),
        (("ask",), "QUESTION"),
        (("ask", "Who?", "-d", "x", "--max-tokens", "0"), "--max-tokens"),
        (("ingest", "missing.txt"), "missing.txt cannot be read"),
        (("ingest", "."), "cannot be read"),
        (("ingest", "a\0b"), "cannot be read"),
        (("ingest", "x", "--mode", "fast"), "--mode"),
        (("count", "x", "--timeout", "0"), "--timeout"),
        (("count", "x", "--timeout", "nan"), "--timeout"),
        (("documents", "list", "--limit", "0"), "--limit"),
        (("documents", "get", ".."), "not a document id"),
        (("documents", "list", "--url", "foo"), "base_url"),
        (("unknown",), "unknown"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_never_sent(run, service, arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert service.requests == []


def test_a_file_that_is_not_utf8_is_exit_code_2(run, service, tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("Über".encode("latin-1"))
    for command in ("ingest", "count"):
        result = run(command, str(path))
        assert result.exit_code == 2
        assert "byte 0" in result.stderr
        assert "iconv" in result.stderr
    assert service.requests == []


def test_a_service_that_is_not_there_is_exit_code_3(text_file):
    arguments = ["count", text_file, "--url", "http://127.0.0.1:1", "--timeout", "0.1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 3
    assert "--url" in result.stderr
    assert json.loads(result.stdout)["code"] == "connection_failed"


def test_a_silent_service_is_exit_code_3(run, service):
    service.hold = threading.Event()
    result = run("documents", "get", "doc_1", "--timeout", "0.2")
    service.hold.set()
    assert result.exit_code == 3
    assert "code: response_timeout" in result.stderr


def test_another_server_is_exit_code_3(run, service):
    service.answer = {"hello": "world"}
    result = run(*ASK, "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["code"] == "unexpected_response"


def test_an_interrupt_is_exit_code_130(service):
    service.hold = threading.Event()
    process = subprocess.Popen(
        [sys.executable, "-c", "from orthros_client.cli import main; main()", *ASK],
        env={**os.environ, "ORTHROS_CLIENT_URL": service.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    # The answer is there while the stream is still open.
    assert process.stdout.read(len("Ishmael.")) == "Ishmael."
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    service.hold.set()
    assert process.returncode == 130
    assert "Interrupted." in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "command",
    [(), ("ingest",), ("ask",), ("summarize",), ("count",), ("documents", "list")],
)
def test_help_teaches_by_examples_and_names_the_exit_codes(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert f"    orthros-client {' '.join(command)}".rstrip() in result.output
    assert "    3    no service was reached" in result.output
    assert "{program}" not in result.output


def test_the_commands_can_be_part_of_another_app(service):
    parent = typer.Typer(name="orthros")

    @parent.command()
    def serve() -> None:
        """Serve."""

    register(parent)
    runner = CliRunner(env={"ORTHROS_CLIENT_URL": service.url})
    assert runner.invoke(parent, [*ASK, "-q"]).stdout == "Ishmael.\n"
    assert "doc_1" in runner.invoke(parent, ["documents", "list"]).stdout
    assert "orthros ask " in runner.invoke(parent, ["ask", "--help"]).output
