"""Say what model directories hold, from their small files and weight headers. Torch-free."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from orthros_service.errors import ModelError
from orthros_service.model.config import load_model_config
from orthros_service.model.json_fields import JsonFields, read_json_object
from orthros_service.model.weight_files import TensorInfo, list_tensors

logger = logging.getLogger(__name__)

DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """One model directory in a few words.

    Args:
        name: From orthros.json, else the directory's name.
        path: The directory.
        architecture: As in config.json.
        num_parameters: Weights in the files, tied ones counted once.
        weight_bytes: Bytes of the weights.
        dtype: Format that most weights are stored in.
        is_converted: Whether the weights were trained with the phase mask.
        trained_context_tokens: Longest context that training covered.
        full_prefill_max_tokens: Longest document that is prefilled in full attention.
        max_context_tokens: Longest context of one request.
        licence: Of the weights; None if the directory does not say.
        weights_note: What else to know about the weights; None if the directory does not say.
    """

    name: str
    path: Path
    architecture: str
    num_parameters: int
    weight_bytes: int
    dtype: str
    is_converted: bool
    trained_context_tokens: int
    full_prefill_max_tokens: int
    max_context_tokens: int
    licence: str | None
    weights_note: str | None


def list_models(root: Path) -> list[ModelSummary]:
    """Every readable model directory directly under root, by name.

    Each unreadable one is left out and logged as a warning.

    Raises:
        ModelError: root is not a directory.
    """
    if not root.is_dir():
        raise ModelError(
            f"{root} is not a directory; make the default model with 'orthros models prepare'."
        )
    summaries = []
    for directory in sorted(root.iterdir()):
        # Names with a dot are directories still being written.
        if directory.name.startswith(".") or not (directory / "config.json").is_file():
            continue
        try:
            summaries.append(describe_model(directory))
        except ModelError as error:
            logger.warning("%s is left out of the list: %s", directory, error.message)
    return summaries


def describe_model(directory: Path) -> ModelSummary:
    """Describe one model directory.

    Raises:
        ModelError: It is missing, incomplete or of an unsupported kind.
    """
    config, orthros = load_model_config(directory)
    tensors = list_tensors(directory)
    if config.has_tied_embeddings:
        tensors.pop("lm_head.weight", None)
    counts = [(info, math.prod(info.shape)) for info in tensors.values()]
    path = directory / "orthros.json"
    notes = read_json_object(path) if path.exists() else JsonFields(source=str(path), members={})
    return ModelSummary(
        name=notes.string("name", default=directory.resolve().name),
        path=directory,
        architecture=config.architecture,
        num_parameters=sum(count for _, count in counts),
        weight_bytes=sum(count * info.item_bytes for info, count in counts),
        dtype=_most_common_dtype(counts),
        is_converted=orthros.is_converted,
        trained_context_tokens=orthros.trained_context_tokens,
        full_prefill_max_tokens=orthros.full_prefill_max_tokens,
        max_context_tokens=orthros.max_context_tokens,
        licence=notes.string("licence") if notes.has("licence") else None,
        weights_note=notes.string("weights_note") if notes.has("weights_note") else None,
    )


def _most_common_dtype(counts: list[tuple[TensorInfo, int]]) -> str:
    totals: dict[str, int] = {}
    for info, count in counts:
        totals[info.dtype] = totals.get(info.dtype, 0) + count
    return DTYPE_NAMES[max(totals, key=totals.__getitem__)]
