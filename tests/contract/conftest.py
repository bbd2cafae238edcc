"""What the house tests look at: the tree as git sees it, and where the packages are."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def tree() -> list[Path]:
    """Every file that is committed or would be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.fixture(scope="session")
def packages() -> dict[str, Path]:
    """Our import packages and their folders."""
    return {
        "orthros_service": ROOT / "orthros_service",
        "orthros_kernels": ROOT / "kernels/orthros_kernels",
        "orthros_deployments": ROOT / "deployments/orthros_deployments",
        "orthros_client": ROOT / "clients/python/orthros_client",
    }
