"""The documents lead where they say, and the commands that they teach exist."""

import re
from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
COMMAND = re.compile(r"^make ([a-z-]+)|`make ([a-z -]+)`", re.MULTILINE)
TARGET = re.compile(r"^([a-z-]+):.*## ", re.MULTILINE)


def test_every_relative_link_leads_to_a_file(root: Path, tree: list[Path]) -> None:
    broken = [
        f"{path.relative_to(root)}: {target}"
        for path in tree
        if path.suffix == ".md"
        for target in LINK.findall(path.read_text(encoding="utf-8"))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert broken == []


def test_every_make_target_that_is_taught_exists(root: Path) -> None:
    targets = set(TARGET.findall((root / "Makefile").read_text(encoding="utf-8")))
    taught = {
        word
        for name in ("README.md", "CONTRIBUTING.md")
        for pair in COMMAND.findall((root / name).read_text(encoding="utf-8"))
        for word in " ".join(pair).split()
    }
    assert {"install", "test", "check", "demo", "serve"} <= targets
    assert taught - targets == set()
