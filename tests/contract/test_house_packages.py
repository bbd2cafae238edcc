"""The two distributions: what they declare, what their wheels hold, that the client stays light."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = {"orthros-service", "orthros-client"}
PACKAGES_OF = {
    "orthros-service": ("orthros_service", "orthros_kernels", "orthros_deployments"),
    "orthros-client": ("orthros_client",),
}
CLIENT_NEVER_HAS = {"torch", "ray", "numpy", "transformers", "orthros-service"}
COMES_WITH_CUDA_BUILDS_OF_TORCH = re.compile("triton|cuda-.*|nvidia-.*")  # pinned by torch itself


@pytest.fixture(scope="module")
def projects(root: Path) -> dict[str, dict[str, object]]:
    files = (root / "pyproject.toml", root / "clients/python/pyproject.toml")
    tables = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return {table["name"]: table for table in tables}


@pytest.fixture(scope="module")
def wheels(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    _pip(
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        root,
        root / "clients/python",
    )
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


def test_both_distributions_have_one_version_and_the_service_asks_for_that_client(projects) -> None:
    version = projects["orthros-service"]["version"]
    assert projects["orthros-client"]["version"] == version
    assert f"orthros-client=={version}" in projects["orthros-service"]["dependencies"]


def test_every_distribution_that_is_needed_is_pinned_to_what_is_installed(root: Path) -> None:
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in pairs}
    installed = {
        name: importlib.metadata.version(name).split("+")[0]
        for name in _closure({"orthros-service": {"dev"}, "orthros-client": set()}) - OURS
        if not COMES_WITH_CUDA_BUILDS_OF_TORCH.fullmatch(name)
    }
    assert installed.items() <= pins.items()


@pytest.mark.parametrize("distribution", sorted(OURS))
def test_every_import_is_a_declared_dependency(
    distribution: str, projects, packages: dict[str, Path]
) -> None:
    declared = {
        canonicalize_name(Requirement(line).name) for line in projects[distribution]["dependencies"]
    }
    homes = importlib.metadata.packages_distributions()
    undeclared = {
        f"{path.name}: {name}"
        for package in PACKAGES_OF[distribution]
        for path in packages[package].rglob("*.py")
        for name in _imported_names(path) - sys.stdlib_module_names
        if name not in PACKAGES_OF[distribution]
        and not COMES_WITH_CUDA_BUILDS_OF_TORCH.fullmatch(name)
        and not declared & {canonicalize_name(home) for home in homes.get(name, [name])}
    }
    assert undeclared == set()


@pytest.mark.parametrize("distribution", sorted(OURS))
def test_a_wheel_holds_its_packages_whole_and_nothing_else(
    distribution: str, wheels: dict[str, Path], packages: dict[str, Path], tree: list[Path]
) -> None:
    expected = {
        f"{package}/{path.relative_to(packages[package]).as_posix()}"
        for package in PACKAGES_OF[distribution]
        for path in tree
        if path.is_relative_to(packages[package])
    }
    with zipfile.ZipFile(wheels[distribution]) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licences = [
            name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")
        ]
    assert files == expected
    assert {f"{package}/py.typed" for package in PACKAGES_OF[distribution]} <= files
    assert len(licences) == 1


def test_the_client_alone_installs_without_torch_or_ray_and_its_command_runs(
    root: Path, wheels: dict[str, Path], tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    options = ("--constraint", root / "constraints.txt", "--quiet")
    _pip("--python", python, "install", *options, wheels["orthros-client"])
    listed = json.loads(_pip("--python", python, "list", "--format", "json"))
    names = {canonicalize_name(entry["name"]) for entry in listed}
    assert "orthros-client" in names
    assert names & CLIENT_NEVER_HAS == set()
    command = [tmp_path / "venv/bin/orthros-client", "--help"]
    shown = subprocess.run(command, check=False, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert all(word in shown.stdout for word in ("ingest", "ask", "summarize"))


def _pip(*arguments: object) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [*command, *map(str, arguments)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _closure(wanted: dict[str, set[str]]) -> set[str]:
    seen: set[tuple[str, str]] = set()
    queue = [(name, extra) for name, extras in wanted.items() for extra in (*extras, "")]
    while queue:
        name, extra = queue.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                queue.extend((canonicalize_name(needed.name), e) for e in (*needed.extras, ""))
    return {name for name, _ in seen}


def _imported_names(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = {
        node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level
    }
    return {re.split(r"\.", name)[0] for name in plain | froms}
