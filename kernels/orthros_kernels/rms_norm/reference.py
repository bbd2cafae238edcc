"""Plain reference of the norm: torch's own."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """X / rms(x) * weight over the last dimension, fp32 inside."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of the sum, and the sum."""
    total = residual + x
    return rms_norm_reference(total, weight, eps=eps), total
