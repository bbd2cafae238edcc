"""The light rooms of the house stay light: what an import really loads, in a fresh process."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "triton", "transformers")

LOAD_ALL = """
import importlib, pkgutil, sys

name = sys.argv[1]
module = importlib.import_module(name)
for info in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
    if not info.name.endswith("__main__"):
        importlib.import_module(info.name)
print([heavy for heavy in sys.argv[2:] if heavy in sys.modules])
"""


@pytest.mark.parametrize(
    "name",
    [
        "orthros_client",
        "orthros_service.citations",
        "orthros_service.documents",
        "orthros_service.engine.types",
        "orthros_service.errors",
        "orthros_service.gateway",
        "orthros_service.pipeline",
        "orthros_service.settings",
        "orthros_service.state.types",
        "orthros_service.tokenization",
        "orthros_service.types",
    ],
)
def test_light_modules_load_no_heavy_library(name: str) -> None:
    assert _loaded_by(name) == "[]"


def test_the_check_notices_a_heavy_library() -> None:
    assert _loaded_by("torch.version") == "['torch']"


def _loaded_by(name: str) -> str:
    command = [sys.executable, "-P", "-c", LOAD_ALL, name, *HEAVY]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
