"""The safetensors files of a model directory, read by their headers only. Torch-free.

A safetensors file is an 8-byte little-endian length, a JSON header of that length, and the tensors'
bytes.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthros_service.errors import ModelError
from orthros_service.model.json_fields import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Number formats that weights may have, and their size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies and what it is.

    Args:
        name: Its name in the file.
        path: The file.
        dtype: "BF16", "F16" or "F32".
        shape: Its dimensions.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return ITEM_BYTES[self.dtype]


def find_weight_files(directory: Path) -> tuple[Path, ...]:
    """The weight files of a model directory, sorted by name.

    Raises:
        ModelError: There are none, or the index names a file that is missing or elsewhere.
    """
    single = directory / SINGLE_FILE
    if single.is_file():
        return (single,)
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ModelError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "weights in other formats must be converted first."
        )
    return tuple(directory / name for name in sorted(set(_weight_map(index).values())))


def list_tensors(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a model directory by name.

    Raises:
        ModelError: A file is missing, truncated or malformed, or the index and its files disagree.
    """
    files = find_weight_files(directory)
    tensors: dict[str, TensorInfo] = {}
    for path in files:
        for info in read_header(path):
            if info.name in tensors:
                raise ModelError(
                    f"{path}: the tensor {info.name!r} is also in {tensors[info.name].path.name}."
                )
            tensors[info.name] = info
    if files[0].name != SINGLE_FILE:
        _check_index(directory / INDEX_FILE, tensors)
    return tensors


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one file; their bytes are not read, but their number is checked.

    Raises:
        ModelError: The file is missing, truncated or malformed.
    """
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
            header_bytes = struct.unpack("<Q", start)[0] if len(start) == LENGTH_BYTES else 0
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, num_bytes - LENGTH_BYTES):
                raise ModelError(
                    f"{path} is no safetensors file, or is truncated: it has {num_bytes} bytes."
                )
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a header that is not JSON: {error}.") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a header that is not an object.")
    header.pop("__metadata__", None)
    tensors = [_tensor_info(path, name, entry) for name, entry in header.items()]
    data_bytes = sum(math.prod(info.shape) * info.item_bytes for info in tensors)
    expected = LENGTH_BYTES + header_bytes + data_bytes
    if num_bytes != expected:
        raise ModelError(
            f"{path} has {num_bytes} bytes; its header describes {expected}. "
            "It is truncated or damaged: fetch it again."
        )
    return tensors


def _tensor_info(path: Path, name: str, entry: Any) -> TensorInfo:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelError(
            f"{path}: the tensor {name!r} has dtype {dtype!r}; allowed are {', '.join(ITEM_BYTES)}."
        )
    if not isinstance(shape, list) or not all(
        isinstance(size, int) and size >= 0 for size in shape
    ):
        raise ModelError(
            f"{path}: the tensor {name!r} has shape {shape!r}; a list of whole numbers is needed."
        )
    return TensorInfo(name=name, path=path, dtype=dtype, shape=tuple(shape))


def _weight_map(index: Path) -> dict[str, str]:
    entries = read_json_object(index).nested("weight_map").members
    if not entries:
        raise ModelError(f"{index}: 'weight_map' is empty; it must name every tensor's file.")
    for name, file in entries.items():
        is_plain = (
            isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file
        )
        if not is_plain:
            raise ModelError(
                f"{index}: the tensor {name!r} is in {file!r}; "
                "allowed is a .safetensors file of the same folder."
            )
        if not (index.parent / file).is_file():
            raise ModelError(
                f"{index}: the file {file!r} of the tensor {name!r} is missing; fetch it again."
            )
    return dict(entries)


def _check_index(index: Path, tensors: dict[str, TensorInfo]) -> None:
    expected = _weight_map(index)
    for name, file in expected.items():
        if name not in tensors or tensors[name].path.name != file:
            raise ModelError(f"{index}: the tensor {name!r} is not in {file!r} as the index says.")
    extra = sorted(set(tensors) - set(expected))
    if extra:
        raise ModelError(
            f"{index} does not name the tensor {extra[0]!r} of {tensors[extra[0]].path.name}."
        )
