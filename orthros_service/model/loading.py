"""Load a Hugging Face model directory into our transformer."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orthros_service.errors import ModelError
from orthros_service.model.config import ModelConfig, OrthrosConfig, load_model_config
from orthros_service.model.digest import model_digest
from orthros_service.model.number_format import choose_device, choose_dtype
from orthros_service.model.transformer import Transformer
from orthros_service.model.weight_files import TensorInfo, list_tensors

__all__ = [
    "LoadedModel",
    "choose_device",
    "choose_dtype",
    "load_model",
    "model_digest",
    "read_weights",
]

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]

DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""Older files hold the rotary frequencies, which follow from the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run: evaluation mode, no gradients.

    Args:
        model: The transformer, on `device`.
        config: Its shape.
        orthros: Its attention's settings.
        digest: Names its numbers; see `model_digest`.
        dtype: Number format of weights and K/V.
        device: Where it lies.
        num_parameters: Weights, tied ones counted once.
    """

    model: Transformer
    config: ModelConfig
    orthros: OrthrosConfig
    digest: str
    dtype: torch.dtype
    device: torch.device
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """One of our parameters and the tensors that are stacked by rows to make it."""

    name: str
    parts: tuple[tuple[str, Shape], ...]


def load_model(directory: Path, *, device: str, dtype: str) -> LoadedModel:
    """Read, check and place a model.

    Args:
        directory: Hugging Face or Orthros model directory.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto", "bfloat16", "float16" or "float32".

    Raises:
        ModelError: The directory is missing, incomplete, damaged or of an unsupported kind.
        InvalidValueError: The device or dtype is not allowed here.
    """
    place = choose_device(device)
    number_format, reason = choose_dtype(dtype, place)
    config, orthros = load_model_config(directory)
    weights = read_weights(directory, config, dtype=number_format)
    with torch.device("meta"):
        model = Transformer(config, orthros)
    model.load_state_dict(weights, assign=True)
    model.to(place).eval().requires_grad_(False)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info(
        "Loaded %s: %d parameters, %s on %s (%s), converted: %s",
        directory,
        num_parameters,
        number_format,
        place,
        reason,
        orthros.is_converted,
    )
    return LoadedModel(
        model=model,
        config=config,
        orthros=orthros,
        digest=model_digest(directory),
        dtype=number_format,
        device=place,
        num_parameters=num_parameters,
    )


def read_weights(directory: Path, config: ModelConfig, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read all weights under the names of `Transformer`'s parameters.

    Args:
        directory: Holds model.safetensors, or shards and their index.
        config: The shape that the tensors must have.
        dtype: Format that they are converted to.

    Returns:
        Contiguous tensors on the CPU, owned by the caller.

    Raises:
        ModelError: A file is truncated; a tensor is missing, unexpected, of the wrong shape, or
            holds non-finite values (also after the conversion to dtype).
    """
    tensors = list_tensors(directory)
    parameters = list(_parameters(config))
    _check_names(directory, tensors, parameters, config)
    with ExitStack() as stack:
        files = {info.path: _open(stack, info.path) for info in tensors.values()}

        def read(name: str) -> Tensor:
            return _read(files[tensors[name].path], tensors[name], dtype)

        # cat copies a single part too: it may be a view of the mapped file, which may change.
        weights = {
            parameter.name: torch.cat([read(name) for name, _ in parameter.parts])
            for parameter in parameters
        }
        has_second_head = config.has_tied_embeddings and "lm_head.weight" in tensors
        if has_second_head and not torch.equal(
            read("lm_head.weight"), weights["embed_tokens.weight"]
        ):
            raise ModelError(
                f"{directory}: config.json says that 'lm_head.weight' is tied to the embedding, "
                "but the two differ."
            )
    return weights


def stored_tensors(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The opposite of `read_weights`: tensors under their Hugging Face names, views of ours."""
    stored: dict[str, Tensor] = {}
    for parameter in _parameters(config):
        rows = [shape[0] for _, shape in parameter.parts]
        for (name, _), part in zip(
            parameter.parts, torch.split(weights[parameter.name], rows), strict=True
        ):
            stored[name] = part
    return stored


def _parameters(config: ModelConfig) -> Iterator[_Parameter]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield _Parameter(
        name="embed_tokens.weight", parts=(("model.embed_tokens.weight", (vocab, hidden)),)
    )
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield _Parameter(
            name=f"{ours}.input_norm.weight",
            parts=((f"{theirs}.input_layernorm.weight", (hidden,)),),
        )
        yield from _attention_parameters(f"{ours}.attention", f"{theirs}.self_attn", config)
        yield _Parameter(
            name=f"{ours}.post_norm.weight",
            parts=((f"{theirs}.post_attention_layernorm.weight", (hidden,)),),
        )
        yield from _mlp_parameters(f"{ours}.mlp", f"{theirs}.mlp", config)
    yield _Parameter(name="norm.weight", parts=(("model.norm.weight", (hidden,)),))
    if not config.has_tied_embeddings:
        yield _Parameter(name="lm_head.weight", parts=(("lm_head.weight", (vocab, hidden)),))


def _attention_parameters(ours: str, theirs: str, config: ModelConfig) -> Iterator[_Parameter]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    yield from _linear(f"{ours}.qkv_proj", theirs, qkv, hidden, has_bias=config.has_qkv_bias)
    yield from _linear(
        f"{ours}.o_proj", theirs, {"o_proj": hidden}, q_rows, has_bias=config.has_o_bias
    )
    if config.has_qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield _Parameter(
                name=f"{ours}.{norm}.weight", parts=((f"{theirs}.{norm}.weight", (head_dim,)),)
            )


def _mlp_parameters(ours: str, theirs: str, config: ModelConfig) -> Iterator[_Parameter]:
    hidden, inner = config.hidden_size, config.intermediate_size
    gate_up = {"gate_proj": inner, "up_proj": inner}
    yield from _linear(
        f"{ours}.gate_up_proj", theirs, gate_up, hidden, has_bias=config.has_mlp_bias
    )
    yield from _linear(
        f"{ours}.down_proj", theirs, {"down_proj": hidden}, inner, has_bias=config.has_mlp_bias
    )


def _linear(
    name: str, theirs: str, rows: dict[str, int], width: int, *, has_bias: bool
) -> Iterator[_Parameter]:
    yield _Parameter(
        name=f"{name}.weight",
        parts=tuple((f"{theirs}.{part}.weight", (n, width)) for part, n in rows.items()),
    )
    if has_bias:
        yield _Parameter(
            name=f"{name}.bias",
            parts=tuple((f"{theirs}.{part}.bias", (n,)) for part, n in rows.items()),
        )


def _check_names(
    directory: Path,
    tensors: dict[str, TensorInfo],
    parameters: list[_Parameter],
    config: ModelConfig,
) -> None:
    expected = {name: shape for parameter in parameters for name, shape in parameter.parts}
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise ModelError(
            f"{directory}: {len(missing)} tensors that config.json calls for are missing, "
            f"first {missing[0]!r}."
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ModelError(
                f"{tensors[name].path}: the tensor {name!r} has shape {list(tensors[name].shape)}; "
                f"config.json calls for {list(shape)}."
            )
    ignored = {"lm_head.weight"} if config.has_tied_embeddings else set()
    extra = sorted(
        n for n in set(tensors) - set(expected) - ignored if not n.endswith(DERIVED_SUFFIX)
    )
    if extra:
        raise ModelError(
            f"{directory}: {len(extra)} tensors are unexpected for {config.architecture}, "
            f"first {extra[0]!r}; this kind of model is not supported."
        )


def _open(stack: ExitStack, path: Path) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}.") from error


def _read(file: Any, info: TensorInfo, dtype: torch.dtype) -> Tensor:
    try:
        stored: Tensor = file.get_tensor(info.name)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{info.path}: the tensor {info.name!r} cannot be read: {error}."
        ) from error
    tensor = stored.to(dtype)
    if not _is_finite(tensor):
        is_ours = _is_finite(stored)
        what = (
            f"does not fit into {dtype}; choose another dtype"
            if is_ours
            else "holds NaN or infinity"
        )
        raise ModelError(f"{info.path}: the tensor {info.name!r} {what}.")
    return tensor


def _is_finite(tensor: Tensor) -> bool:
    # The extremes carry NaN and infinity along, and cost a twentieth of `isfinite` on every number.
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
