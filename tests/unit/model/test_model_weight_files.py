import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from orthros_service.errors import ModelError
from orthros_service.model.weight_files import find_weight_files, list_tensors, read_header

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)


def write_shards(directory: Path, weight_map: Any) -> Path:
    save_file({"a": A}, directory / "one.safetensors")
    save_file({"b": B}, directory / "two.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def write_header(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_names_shapes_and_dtypes_come_from_the_header(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = list_tensors(tmp_path)
    assert {name: (info.dtype, info.shape) for name, info in tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
    }


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    tensors = list_tensors(tmp_path)
    assert tensors["a"].path.name == "one.safetensors"
    assert tensors["b"].path.name == "two.safetensors"
    assert [path.name for path in find_weight_files(tmp_path)] == [
        "one.safetensors",
        "two.safetensors",
    ]


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"a": "one.safetensors", "b": "three.safetensors"}, "three.safetensors' of the tensor"),
        ({"a": "two.safetensors", "b": "two.safetensors"}, "'a' is not in 'two.safetensors'"),
        ({"c": "one.safetensors"}, "'c' is not in 'one.safetensors'"),
        ({"a": "../one.safetensors"}, "of the same folder"),
        ({"a": "one.bin"}, "of the same folder"),
        ({"a": 1}, "of the same folder"),
        ({}, "is empty"),
        ([], "an object"),
    ],
)
def test_an_index_that_disagrees_with_its_files_is_refused(
    weight_map: Any, problem: str, tmp_path: Path
) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(ModelError) as caught:
        list_tensors(tmp_path)
    assert problem in caught.value.message


def test_a_shard_with_a_tensor_that_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "one.safetensors"})
    save_file({"a": A, "extra": B}, tmp_path / "one.safetensors")
    with pytest.raises(ModelError, match="'extra'"):
        list_tensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    save_file({"a": A, "b": B}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match=r"'a' is also in one\.safetensors"):
        list_tensors(tmp_path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": A, "b": B}, path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match="truncated"):
            read_header(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(ModelError, match="damaged"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"{]", "not JSON"),
        (b"\xff\xff", "not JSON"),
        (b"[]", "not an object"),
        (b'{"a": 1}', "dtype None"),
        (b'{"a": {"dtype": "I8", "shape": [1]}}', "dtype 'I8'; allowed are BF16, F16, F32"),
        (b'{"a": {"dtype": ["F32"], "shape": [1]}}', "dtype \\['F32'\\]"),
        (b'{"a": {"dtype": "F32", "shape": [-1]}}', "shape"),
        (b'{"a": {"dtype": "F32", "shape": "1"}}', "shape"),
    ],
)
def test_a_malformed_header_is_refused(header: bytes, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=problem):
        read_header(write_header(tmp_path / "model.safetensors", header))


def test_a_directory_without_weights_says_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="must be converted first"):
        find_weight_files(tmp_path)
