import json
import os
import shutil
from pathlib import Path

import pytest

from orthros_service.errors import ModelError
from orthros_service.model import digest as digest_module
from orthros_service.model.digest import CACHE_FILE, model_digest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights" * 1000)
    return path


def test_the_digest_follows_contents_and_not_places(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    assert model_digest(copy) == model_digest(directory)
    assert len(model_digest(directory)) == 64


@pytest.mark.parametrize("name", ["config.json", "orthros.json", "model.safetensors"])
def test_every_file_that_shapes_the_numbers_changes_the_digest(name: str, directory: Path) -> None:
    before = model_digest(directory)
    (directory / name).write_bytes(b"other")
    assert model_digest(directory) != before


def test_tokenizer_and_notes_do_not_change_the_digest(directory: Path) -> None:
    before = model_digest(directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("hello")
    assert model_digest(directory) == before


def test_weights_are_read_once_while_size_and_time_stay_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model_digest(directory)

    def refuse(*_: object) -> None:
        raise AssertionError("the weights were read again")

    monkeypatch.setattr(digest_module.hashlib, "file_digest", refuse)
    assert model_digest(directory) == before


def test_a_kept_digest_is_not_trusted_when_size_or_time_differ(directory: Path) -> None:
    before = model_digest(directory)
    weights = directory / "model.safetensors"
    times = (weights.stat().st_atime_ns, weights.stat().st_mtime_ns)
    weights.write_bytes(b"weights" * 999)
    os.utime(weights, ns=times)
    shorter = model_digest(directory)
    assert shorter != before
    weights.write_bytes(b"WEIGHTS" * 999)
    os.utime(weights, ns=(times[0], times[1] + 1))
    assert model_digest(directory) not in (before, shorter)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"model.safetensors": 3}',
        b'{"model.safetensors": {"sha256": 3}}',
        b'{"model.safetensors": {"sha256": "0"}}',
    ],
)
def test_a_damaged_cache_is_replaced(content: bytes, directory: Path) -> None:
    before = model_digest(directory)
    cache = directory / CACHE_FILE
    cache.write_bytes(content)
    assert model_digest(directory) == before
    assert list(json.loads(cache.read_text())) == ["model.safetensors"]


def test_a_directory_that_cannot_be_written_still_has_a_digest(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", refuse)
        digest = model_digest(directory)
    assert not (directory / CACHE_FILE).exists()
    assert model_digest(directory) == digest


def test_a_directory_without_weights_has_no_digest(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds neither"):
        model_digest(directory)
