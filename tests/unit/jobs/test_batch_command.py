"""The command `orthros batch run`: what it refuses, shows and returns. Ray takes no part."""

import json
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from orthros_deployments import batch_cli
from orthros_deployments.batch_display import job_progress
from orthros_service.errors import UnavailableError
from orthros_service.jobs import JobFailedError
from orthros_service.jobs.worker import Advance


@pytest.fixture
def command(tmp_path):
    """Run `batch run` on a folder, into `out`; returns the result."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    batch_cli.register(app)

    def invoke(source, *options):
        arguments = ["batch", "run", "--input", str(source), "--output", str(tmp_path / "out")]
        return CliRunner().invoke(app, [*arguments, *options])

    return invoke


@pytest.fixture
def on_cluster(monkeypatch):
    """Put a function in the place of `run_batch`, and a service that runs beside it."""

    def place(run_batch):
        module = SimpleNamespace(run_batch=run_batch)
        monkeypatch.setitem(sys.modules, "orthros_deployments.batch", module)
        monkeypatch.setattr(batch_cli, "running_service", lambda *_, **__: nullcontext())

    return place


@pytest.fixture
def finished(on_cluster, run_job):
    """Let the command's jobs run in this process, on the fake backend."""

    def run_batch(spec, plan, *, on_progress):
        values = spec.model_dump(exclude_defaults=True)
        return run_job(values.pop("input"), **values).report

    on_cluster(run_batch)


def test_a_job_without_errors_ends_with_zero_and_a_table(command, write, finished, tmp_path):
    result = command(write(text=["one", "two"]), "--question", "Who?")

    assert result.exit_code == 0, result.output
    assert "2 rows in 1 Parquet file\n" in result.stderr
    assert "(1 file)" in result.stdout
    assert "rows in, out" in result.stdout
    assert "fake-model (converted: false)" in result.stdout
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_error_rows_end_with_three_and_are_counted_by_code(command, write, finished):
    result = command(write(text=["one", None, "", None]), "--summarize")

    assert result.exit_code == 3
    assert "3 (null_document 2, empty_document 1)" in result.stdout


def test_json_is_one_object_on_standard_output(command, write, finished):
    result = command(write(text=["one", None]), "--summarize", "--json", "--limit", "2", "--quiet")

    report = json.loads(result.stdout)
    assert result.stderr == ""
    assert report["object"] == "batch.report"
    assert (report["rows_in"], report["rows_ok"], report["rows_failed"]) == (2, 1, 1)
    assert report["errors_by_code"] == {"null_document": 1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "exactly one of question"),
        (["--question", "a", "--summarize"], "exactly one of question"),
        (["--summarize", "--text-column", "txt"], "Did you mean 'text'?"),
        (["--summarize", "--output", "s3://bucket/x"], "URI"),
    ],
)
def test_what_can_be_refused_is_refused_before_any_work(
    command, write, monkeypatch, options, words
):
    monkeypatch.setattr(batch_cli, "_execute", lambda *_, **__: pytest.fail("work began"))

    result = command(write(text=["one"]), *options, "--json")

    assert result.exit_code == 2
    assert words in result.stderr
    error = json.loads(result.stdout)
    assert (error["object"], error["exit_code"]) == ("error", 2)
    assert words in error["message"]


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_numbers_out_of_range_are_wrong_usage(command, write, value):
    assert command(write(text=["one"]), "--summarize", "--concurrency", value).exit_code == 2


def test_without_a_service_the_command_says_how_to_start_one(command, write, monkeypatch):
    class NoService:
        def __enter__(self):
            raise UnavailableError("No service runs here. Start one with `orthros serve`.")

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(batch_cli, "running_service", lambda *_, **__: NoService())

    result = command(write(text=["one"]), "--summarize", "--no-start-service")

    assert result.exit_code == 2
    assert "orthros serve" in result.stderr


@pytest.mark.parametrize(
    ("error", "exit_code", "words"),
    [
        (JobFailedError("The job stopped early."), 1, "code: job_failed"),
        (KeyboardInterrupt(), 130, "must not be used"),
    ],
)
def test_a_job_that_does_not_end_says_so(command, write, on_cluster, error, exit_code, words):
    def run_batch(spec, plan, *, on_progress):
        raise error

    on_cluster(run_batch)
    result = command(write(text=["one"]), "--summarize")

    assert result.exit_code == exit_code
    assert words in result.stderr
    assert result.stdout == ""


def test_progress_counts_rows_tokens_and_errors_and_always_ends_complete(capsys):
    with job_progress(3, is_quiet=False) as show:
        show(Advance(num_rows=1, num_tokens=10))
        show(Advance(num_rows=4, num_failed=1, num_tokens=40))

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("3 of 3 rows, ")
    assert line.endswith("tokens/s, 1 error")


def test_the_help_loads_no_ray():
    code = "import orthros_deployments.batch_cli, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_output_folder_that_cannot_be_written_is_refused_before_the_service_is_asked(
    command, write, on_cluster, monkeypatch, tmp_path
):
    def never(*_, **__):
        raise AssertionError("the service was asked")

    on_cluster(never)
    monkeypatch.setattr(batch_cli, "running_service", never)
    # Where a folder is wanted there is a file: refused for every user, even the superuser.
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "_job").touch()

    result = command(write(text=["one"]), "--question", "Who?")

    assert result.exit_code == 2, result.output
    assert "cannot be written" in result.stderr
    assert str(tmp_path / "out") in result.stderr


def test_a_usage_error_is_told_in_our_words_only(command, write):
    result = command(write(text=["one"]))

    assert result.exit_code == 2, result.output
    assert "is not valid: give exactly one of" in result.stderr
