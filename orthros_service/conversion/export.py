"""Writing the merged model as a Hugging Face directory that the service loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from orthros_service.conversion.config import ConversionConfig
from orthros_service.errors import ModelError
from orthros_service.model.config import ModelConfig
from orthros_service.model.loading import stored_tensors
from orthros_service.model.transformer import Transformer
from orthros_service.model.writing import write_json, write_weights

_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
    "special_tokens_map.json", "LICENSE",
)  # fmt: skip


def export_model(
    model: Transformer, shape: ModelConfig, config: ConversionConfig, target: Path
) -> None:
    """Write weights, configuration, tokenizer and `orthros.json`; all of it or nothing.

    Args:
        model: With its updates merged.
        shape: Of the model.
        config: The conversion.
        target: Folder to make; one that is there is replaced.

    Raises:
        ModelError: It cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in _COPIED:
            if (config.model / name).is_file():
                shutil.copyfile(config.model / name, partial / name)
        write_json(partial / "config.json", _model_config(config))
        write_json(partial / "orthros.json", _orthros(config))
        weights = {
            name: tensor.to(torch.bfloat16).contiguous().cpu()
            for name, tensor in stored_tensors(model.state_dict(), shape).items()
        }
        write_weights(partial, weights)
        shutil.rmtree(target, ignore_errors=True)
        partial.replace(target)
    except OSError as error:
        raise ModelError(f"The converted model {target} cannot be written: {error}.") from error


def _model_config(config: ConversionConfig) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((config.model / "config.json").read_text(encoding="utf-8"))
    theta = config.attention.rope_theta
    if theta is not None:
        if isinstance(values.get("rope_parameters"), dict):
            values["rope_parameters"]["rope_theta"] = theta
        else:
            values["rope_theta"] = theta
    return values


def _orthros(config: ConversionConfig) -> dict[str, Any]:
    own = config.model / "orthros.json"
    base = json.loads(own.read_text(encoding="utf-8")) if own.is_file() else {}
    kept = {name: base[name] for name in ("base_model", "source", "licence") if name in base}
    return {
        "name": config.name or f"{config.model.resolve().name}-orthros",
        "is_converted": True,
        **kept,
        "window": config.attention.window,
        "num_sinks": config.attention.num_sinks,
        "trained_context_tokens": config.data.max_document_tokens,
        "weights_note": (
            f"converted on {config.training.steps * config.training.row_tokens:,} tokens, updates "
            f"of rank {config.training.rank} merged"
        ),
    }
