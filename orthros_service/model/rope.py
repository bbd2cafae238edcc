"""Rotary position embeddings, half-split: dimension i of a head turns with dimension i + D/2.

Angles are computed in fp64: at a million tokens, fp32 angles would move a logit by 0.1.
Shapes: D head size.
"""

import math

import torch
from torch import Tensor

from orthros_service.model.config import ModelConfig, RopeScaling


class RotaryTable:
    """Cosines and sines of one model at any position.

    Nothing is stored per position, so memory does not grow with the context.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | str) -> None:
        """Derive the frequencies.

        Args:
            config: Head size, theta and scaling.
            device: Where `cos_sin` computes; positions must be there.
        """
        self._frequencies = _frequencies(config).to(device)
        self._scale = _attention_factor(config.rope_scaling)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotation at each position, times the scaling's attention factor.

        Args:
            positions: int64, any shape, on the table's device.

        Returns:
            cos and sin, fp32, [*positions.shape, D]: for both halves of a head, the sine of the
            first half negated, as `rotate` takes them.
        """
        cos, sin = self.half_cos_sin(positions)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def half_cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same for one half of a head, the sine as it is: what the CUDA kernels take.

        Args:
            positions: int64, any shape, on the table's device.

        Returns:
            cos and sin, fp32, [*positions.shape, D/2], contiguous.
        """
        angles = positions.to(torch.float64).unsqueeze(-1) * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return cos.to(torch.float32), sin.to(torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys.

    Args:
        x: [..., D], any floating dtype.
        cos: fp32, [..., D], broadcastable to x.
        sin: Like cos.

    Returns:
        Same shape and dtype as x; computed in fp32.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return (x * cos).addcmul_(swapped, sin).to(x.dtype)


def _frequencies(config: ModelConfig) -> Tensor:
    """Radians per token of each pair of dimensions, fp64, [D/2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    match scaling.kind:
        case "linear":
            return plain / scaling.factor
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, scaling, config.rope_theta)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend between.

    Source: the rope scaling published with Llama 3.1.
    """
    assert scaling.original_max_position_embeddings is not None
    assert scaling.low_freq_factor is not None
    assert scaling.high_freq_factor is not None
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _yarn(plain: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Keep dimensions that turn often within the original context, divide slow ones, blend between.

    Source: Peng et al. 2023, "YaRN", sections 3.2 and 3.3.
    """
    context = scaling.original_max_position_embeddings
    assert context is not None
    half = plain.shape[0]

    def pair_with_turns(turns: float) -> float:
        return half * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    # A tiny width keeps the ramp defined where both ends fall on one pair.
    width = high - low if high != low else 0.001
    divided = ((torch.arange(half, dtype=torch.float64) - low) / width).clamp(0.0, 1.0)
    return plain / scaling.factor * divided + plain * (1 - divided)


def _attention_factor(scaling: RopeScaling | None) -> float:
    """What yarn multiplies cos and sin by; 1 for the others.

    Source: Peng et al. 2023, "YaRN", section 3.4, with the mscale weights that later models added.
    """
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (1 + growth * scaling.mscale) / (1 + growth * scaling.mscale_all_dim)
    return 1 + growth
