"""The `orthros` command without a service."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from orthros_deployments.cli import app

CODE = """
import sys
from orthros_deployments.cli import app
print([name for name in ("torch", "ray", "transformers", "pandas") if name in sys.modules])
"""


@pytest.fixture
def orthros():
    def run(*arguments):
        return CliRunner().invoke(app, arguments)

    return run


def test_help_names_every_command(orthros):
    shown = orthros("--help")
    assert shown.exit_code == 0
    for command in ("serve", "models", "ingest", "ask", "summarize", "count", "documents", "batch"):
        assert f"  {command} " in shown.stdout


def test_the_command_line_loads_nothing_heavy():
    command = [sys.executable, "-P", "-c", CODE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("port", ["0", "65536", "eighty"])
def test_a_port_that_cannot_be_is_a_usage_error(orthros, port):
    assert orthros("serve", "--port", port).exit_code == 2


def test_an_unknown_setting_stops_the_start_and_is_named(orthros, monkeypatch):
    monkeypatch.setenv("ORTHROS_GATEWAY__PROT", "1")
    refused = orthros("serve")
    assert refused.exit_code == 1
    assert "prot" in refused.stderr.lower()


def test_no_models_are_no_error_and_say_how_to_make_one(orthros, tmp_path):
    listed = orthros("models", "list", str(tmp_path), "--json")
    assert listed.exit_code == 0
    assert json.loads(listed.stdout) == []
    assert "orthros models prepare" in orthros("models", "list", str(tmp_path)).stderr


@pytest.mark.parametrize("command", [("show",), ("list",)], ids=["show", "list"])
def test_a_missing_model_folder_is_one_sentence(orthros, tmp_path, command):
    missing = orthros("models", *command, str(tmp_path / "none"))
    assert missing.exit_code == 1
    assert missing.stderr.startswith("Error: ")
    assert "Traceback" not in missing.stderr


def test_the_version_is_told(orthros):
    result = orthros("--version")
    assert result.exit_code == 0
    assert result.stdout == f"orthros {version('orthros-service')}\n"
