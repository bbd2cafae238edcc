"""The demo shows commands that fit a terminal and can be copied, and uses its own service."""

import shlex

import pytest

from orthros_deployments.demo import __main__ as demo
from orthros_deployments.demo.__main__ import (
    QUESTIONS,
    WIDTH,
    StepFailedError,
    command_lines,
    show_start,
)


@pytest.mark.parametrize(
    "words",
    [
        ("orthros", "models", "list"),
        ("orthros", "ask", QUESTIONS[0], "--file", f"/tmp/{'f' * 40}", "--max-tokens", "64"),
        ("orthros", "batch", "run", *("--input", "/tmp/a b.parquet") * 5),
    ],
)
def test_commands_fit_the_terminal_and_can_be_copied(words):
    lines = command_lines(words)

    assert max(map(len, lines)) <= WIDTH
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == ["$", *words]


def test_the_address_of_its_own_service_is_read_from_what_the_service_says(capsys):
    said = ["Orthros serves m at http://x:1\n", "  API: x\n", "  Ray: 10.0.0.2:6379   Ctrl-C\n"]

    assert show_start(iter(said)) == "10.0.0.2:6379"
    assert capsys.readouterr().out == "".join(said)


def test_a_service_that_ends_at_its_start_fails_the_demo():
    with pytest.raises(StepFailedError, match="ended before"):
        show_start(["Orthros serves m at http://x:1\n"])


@pytest.mark.parametrize(
    ("error", "exit_code", "words"),
    [(KeyboardInterrupt(), 130, "was interrupted"), (StepFailedError("why"), 1, "failed: why")],
)
def test_a_demo_that_does_not_end_says_so(monkeypatch, capsys, error, exit_code, words):
    def run(folder):
        raise error

    monkeypatch.setattr(demo.os, "environ", {})
    monkeypatch.setattr(demo, "run", run)

    assert demo.main() == exit_code
    assert words in capsys.readouterr().out
