"""What a worker process loads at its start: model, tokenizer, layout of its states."""

import logging
from dataclasses import dataclass

import torch

from orthros_kernels import Backend, force_backend
from orthros_service.engine.memory import keep_large_buffers
from orthros_service.errors import InvalidValueError
from orthros_service.model.int8_linear import quantize_for_decode
from orthros_service.model.loading import LoadedModel, load_model
from orthros_service.settings import Settings
from orthros_service.state.tensors import TORCH_DTYPES
from orthros_service.state.types import KVDtype, StateLayout
from orthros_service.tokenization import Tokenizer
from orthros_service.types import ModelInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A loaded model with everything that workers must agree on.

    Args:
        loaded: The model on its device.
        tokenizer: Its tokenizer.
        layout: Layout of its states; `mode` is a placeholder that each document replaces.
        info: What the API says about it.
    """

    loaded: LoadedModel
    tokenizer: Tokenizer
    layout: StateLayout
    info: ModelInfo


def load_served_model(settings: Settings, *, for_decode: bool) -> ServedModel:
    """Load the model that the settings name.

    Args:
        settings: All settings.
        for_decode: Whether this process decodes; only then are int8 weights prepared.

    Raises:
        ModelError: The directory is missing, damaged or of an unsupported kind.
        InvalidValueError: A setting does not fit the model or the machine.
    """
    if settings.model.num_threads is not None:
        torch.set_num_threads(settings.model.num_threads)
    loaded = load_model(
        settings.model.directory, device=settings.model.device, dtype=settings.model.dtype
    )
    _choose_kernels(settings.model.kernels, loaded.device)
    if loaded.device.type == "cpu":
        keep_large_buffers()
    if for_decode and settings.model.decode_weights == "int8":
        _use_int8(loaded)
    tokenizer = Tokenizer.from_directory(settings.model.directory)
    layout = _layout(loaded, tokenizer, settings)
    return ServedModel(
        loaded=loaded, tokenizer=tokenizer, layout=layout, info=_info(loaded, layout, settings)
    )


def _choose_kernels(kernels: Backend, device: torch.device) -> None:
    if kernels == "triton" and device.type != "cuda":
        raise InvalidValueError(
            f"ORTHROS_MODEL__KERNELS=triton needs a GPU, and the model is on {device}; use 'auto'."
        )
    force_backend(kernels)
    is_triton = device.type == "cuda" and kernels != "reference"
    logger.info(
        "Attention runs in %s (kernels=%s, device=%s)",
        "Triton kernels" if is_triton else "plain torch",
        kernels,
        device,
    )


def _use_int8(loaded: LoadedModel) -> None:
    if loaded.device.type != "cpu":
        raise InvalidValueError(
            "ORTHROS_MODEL__DECODE_WEIGHTS=int8 works on the CPU only; use 'native' elsewhere."
        )
    quantize_for_decode(loaded.model)
    logger.info("Decode steps of few rows use int8 weights (per output channel), as set")


def _layout(loaded: LoadedModel, tokenizer: Tokenizer, settings: Settings) -> StateLayout:
    segment_tokens, tile = settings.prefill.segment_tokens, loaded.orthros.tile
    if segment_tokens % tile or segment_tokens < loaded.orthros.window:
        raise InvalidValueError(
            f"ORTHROS_PREFILL__SEGMENT_TOKENS is {segment_tokens}; it must be a multiple of the "
            f"model's tile {tile} and at least its window {loaded.orthros.window}."
        )
    return StateLayout(
        model_digest=loaded.digest,
        tokenizer_digest=tokenizer.digest,
        num_layers=loaded.config.num_layers,
        num_kv_heads=loaded.config.num_kv_heads,
        head_dim=loaded.config.head_dim,
        dtype=_kv_dtype(loaded.dtype),
        window=loaded.orthros.window,
        num_sinks=loaded.orthros.num_sinks,
        mode="linear",
        segment_tokens=segment_tokens,
    )


def _kv_dtype(dtype: torch.dtype) -> KVDtype:
    return next(name for name, known in TORCH_DTYPES.items() if known == dtype)


def _info(loaded: LoadedModel, layout: StateLayout, settings: Settings) -> ModelInfo:
    orthros = loaded.orthros
    return ModelInfo(
        name=settings.model.directory.resolve().name,
        is_converted=orthros.is_converted,
        trained_context_tokens=orthros.trained_context_tokens,
        full_prefill_max_tokens=settings.prefill.full_prefill_max_tokens
        or orthros.full_prefill_max_tokens,
        max_context_tokens=orthros.max_context_tokens,
        num_parameters=loaded.num_parameters,
        window=orthros.window,
        dtype=layout.dtype,
        digest=loaded.digest,
    )
