"""The demo shows commands that fit a terminal and that a reader can copy."""

import shlex

import pytest

from orthros_deployments.demo.__main__ import QUESTIONS, WIDTH, command_lines


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
