"""The layout rules of CONTRIBUTING.md that no linter knows."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

MAX_LINES = 300
FOLDERS_THAT_ARE_NOT_PACKAGES = ("kernels", "clients", "deployments", "docker", "tests")

# In pieces, so that this file does not name them.
REGISTRY_HOSTS = [
    "".join(pieces)
    for pieces in (
        ("py", "pi.", "org"),
        ("python", "hosted."),
        ("download.", "pytorch.", "org"),
        ("deb.", "debian."),
        ("npm", "js.", "org"),
        ("ana", "conda.", "org"),
    )
]


@pytest.mark.parametrize("folder", FOLDERS_THAT_ARE_NOT_PACKAGES)
def test_top_folders_with_common_names_are_not_packages(root: Path, folder: str) -> None:
    found = list((root / folder).glob("__init__.py")) + list((root / "tests").rglob("__init__.py"))
    assert found == []


def test_the_repository_root_is_not_on_the_import_path(root: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u; print([n for n in ('tests', 'docker') if u.find_spec(n)])"
    code += "; s = u.find_spec('kernels'); print(list(s.submodule_search_locations) if s else [])"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert str(root / "kernels") not in printed.stdout
    assert printed.stdout.splitlines()[0] == "[]"


def test_every_folder_of_a_package_is_a_package(packages: dict[str, Path]) -> None:
    # import-linter does not see what lies in a folder without __init__.py.
    folders = {path.parent for home in packages.values() for path in home.rglob("*.py")}
    assert sorted(str(path) for path in folders if not (path / "__init__.py").exists()) == []


def test_init_files_only_re_export_with_a_sorted_all(packages: dict[str, Path]) -> None:
    problems = {
        str(path): problem
        for folder in packages.values()
        for path in sorted(folder.rglob("__init__.py"))
        if (problem := _problem_of_init(path.read_text(encoding="utf-8")))
    }
    assert problems == {}


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("X = 1\n", "statement"),
        ("from a import b\n", "__all__"),
        ('from a import b, c\n\n__all__ = ["c", "b"]\n', "sorted"),
        ('from a import b\n\n__all__ = ["b", "c"]\n', "match"),
    ],
)
def test_the_check_of_init_files_notices(source: str, word: str) -> None:
    problem = _problem_of_init(source)
    assert problem is not None
    assert word in problem


def test_no_python_file_is_longer_than_one_noun_needs(root: Path, tree: list[Path]) -> None:
    lengths = {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for path in tree
        if path.suffix == ".py" and not _is_triton(path, root)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_file_names_the_host_of_a_package_registry(root: Path, tree: list[Path]) -> None:
    pattern = re.compile("|".join(map(re.escape, REGISTRY_HOSTS)).encode(), re.IGNORECASE)
    naming = [str(path.relative_to(root)) for path in tree if pattern.search(path.read_bytes())]
    assert naming == []


def test_test_files_have_unique_names(root: Path) -> None:
    names = [path.name for path in (root / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def _is_triton(path: Path, root: Path) -> bool:
    return path.name == "triton_kernel.py" and path.is_relative_to(root / "kernels")


def _problem_of_init(source: str) -> str | None:
    body = ast.parse(source).body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    others = [node for node in body if not isinstance(node, ast.ImportFrom)]
    names = [alias.asname or alias.name for node in imports for alias in node.names]
    if not others:
        return "imports without __all__" if names else None
    assigned = others[0]
    is_all = isinstance(assigned, ast.Assign) and ast.unparse(assigned.targets[0]) == "__all__"
    if len(others) > 1 or not is_all:
        return "holds another statement than imports and __all__"
    exported = list(ast.literal_eval(assigned.value))
    if exported != sorted(exported, key=_order):
        return "__all__ is not sorted (constants, classes, functions)"
    return None if set(exported) == set(names) else "__all__ and the imports do not match"


def _order(name: str) -> tuple[int, str]:
    if name.isupper():
        return 0, name
    return (1 if name[0].isupper() else 2), name
