"""The files of a model directory, written as Hugging Face's are."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from orthros_service.errors import ModelError
from orthros_service.model.weight_files import SINGLE_FILE


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write one JSON object, readable and in UTF-8."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Write all weights into one file beside config.json, which is there already.

    Raises:
        ModelError: The weights cannot be written.
    """
    path = directory / SINGLE_FILE
    try:
        save_file(dict(weights), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise ModelError(f"{path} cannot be written: {error}.") from error
    # safetensors makes it readable by its owner alone; a worker may run as another user.
    path.chmod((directory / "config.json").stat().st_mode)
