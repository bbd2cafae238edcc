"""The digest that names a model's numbers: states of one model must not be read with another.

Torch-free.
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from orthros_service.errors import ModelError
from orthros_service.model.weight_files import find_weight_files

logger = logging.getLogger(__name__)

CONFIG_FILES = ("config.json", "orthros.json")
CACHE_FILE = ".digests.json"
"""Digests of weight files by name, with the size and modification time that they hold for."""


def model_digest(directory: Path) -> str:
    """SHA-256, hex, over the names and contents of the config and weight files.

    Reading gigabytes at every start is slow, so digests of weight files are kept beside them, if
    the directory is writable, and used again while size and modification time are the same.

    Raises:
        ModelError: A file is missing or cannot be read.
    """
    weights = find_weight_files(directory)
    configs = [directory / name for name in CONFIG_FILES if (directory / name).is_file()]
    cached = _read_cache(directory / CACHE_FILE)
    entries: dict[str, dict[str, Any]] = {}
    total = hashlib.sha256()
    try:
        for path in (*configs, *weights):
            if path in weights:
                entry = _entry(path, cached.get(path.name))
                entries[path.name] = entry
                digest = entry["sha256"]
            else:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.name}\0{digest}\n".encode())
    except OSError as error:
        raise ModelError(f"A file of the model in {directory} cannot be read: {error}.") from error
    if entries != cached:
        _write_cache(directory / CACHE_FILE, entries)
    return total.hexdigest()


def _entry(path: Path, cached: object) -> dict[str, Any]:
    status = path.stat()
    key = {"num_bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    known = cached.get("sha256") if isinstance(cached, dict) else None
    if isinstance(known, str) and cached == {**key, "sha256": known}:
        return {**key, "sha256": known}
    with path.open("rb") as file:
        return {**key, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _read_cache(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_cache(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(entries), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.debug("The digests of %s are not kept: %s", path.parent, error)
