"""What a conversion will take, told before it starts."""

import time
from dataclasses import dataclass

import torch

from orthros_service.conversion.config import ConversionConfig
from orthros_service.model.config import ModelConfig

_PROBE_SIZE = {"cuda": 4096, "cpu": 1024}
# Share of the time of a step that its matrix products take; measured on one GPU.
_PRODUCTS_SHARE = {"cuda": 0.4, "cpu": 0.6}
_BYTES_OF_UPDATE = 16
_ELEMENTS_PER_HIDDEN = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Rough needs of a conversion.

    Args:
        num_trainable: Parameters that are trained.
        memory_bytes: On the device, at the peak of a step.
        tokens: Trained on in all.
        seconds: Until the end.
    """

    num_trainable: int
    memory_bytes: int
    tokens: int
    seconds: float


def estimate(config: ConversionConfig, shape: ModelConfig, device: torch.device) -> Estimate:
    """Estimate a conversion from its sizes and a short matrix product on the device."""
    training = config.training
    kind = "cuda" if device.type == "cuda" else "cpu"
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    width = shape.num_q_heads * shape.head_dim
    layers = ((hidden, heads), (width, hidden), (hidden, 2 * inner), (inner, hidden))
    weights = shape.num_layers * sum(a * b for a, b in layers)
    trainable = shape.num_layers * training.rank * sum(a + b for a, b in layers)
    item = 2 if kind == "cuda" else 4
    embedding = shape.vocab_size * hidden
    activations = training.row_tokens * shape.num_layers * _ELEMENTS_PER_HIDDEN * hidden * item
    # Forward and the gradient of the input for frozen weights; the updates' own gradient too.
    flops = training.row_tokens * (4 * weights + 6 * trainable)
    step_s = flops / _flops_per_s(device, _PROBE_SIZE[kind]) / _PRODUCTS_SHARE[kind]
    return Estimate(
        num_trainable=trainable,
        memory_bytes=(weights + embedding) * item + trainable * _BYTES_OF_UPDATE + activations,
        tokens=training.steps * training.row_tokens,
        seconds=training.steps * step_s,
    )


def _flops_per_s(device: torch.device, size: int) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(size, size, device=device, dtype=dtype)
    begin = 0.0
    for turn in range(4):
        if turn == 1:
            _synchronize(device)
            begin = time.perf_counter()
        x @ x
    _synchronize(device)
    return 3 * 2.0 * size**3 / (time.perf_counter() - begin)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
