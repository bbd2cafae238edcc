"""Root-mean-square norm: checks and dispatch."""

import torch
from torch import Tensor

from orthros_kernels.errors import Backend, KernelError, resolve_backend
from orthros_kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference

MAX_WIDTH = 2**16


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, backend: Backend = "auto") -> Tensor:
    """X / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        x: [..., M], fp32, bf16 or fp16.
        weight: [M], in x's dtype.
        eps: Added to the mean square.
        backend: "auto" takes Triton on CUDA and torch elsewhere.

    Returns:
        Like x; computed in fp32.

    Raises:
        KernelError: Width, dtype or device do not fit.
    """
    _check(x, weight)
    if resolve_backend(backend, x) == "triton":
        from orthros_kernels.rms_norm.triton_kernel import rms_norm_triton

        normed, _ = rms_norm_triton(x.reshape(-1, x.shape[-1]), None, weight, eps=eps)
        return normed.view(x.shape)
    return rms_norm_reference(x, weight, eps=eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """The norm of residual + x, and that sum, in one pass over memory.

    Args:
        x: A layer's update, [..., M].
        residual: What it is added to, like x.
        weight: [M], in x's dtype.
        eps: Added to the mean square.
        backend: As for `rms_norm`.

    Returns:
        The norm of the rounded sum, and the rounded sum.

    Raises:
        KernelError: Shapes, dtypes or devices do not fit.
    """
    _check(x, weight)
    if not (residual.shape == x.shape and residual.dtype == x.dtype):
        raise KernelError(
            f"residual is {residual.dtype} {tuple(residual.shape)}, x is {x.dtype} {tuple(x.shape)}"
        )
    if resolve_backend(backend, x) == "triton":
        from orthros_kernels.rms_norm.triton_kernel import rms_norm_triton

        rows = (-1, x.shape[-1])
        normed, total = rms_norm_triton(x.reshape(rows), residual.reshape(rows), weight, eps=eps)
        return normed.view(x.shape), total.view(x.shape)
    return add_rms_norm_reference(x, residual, weight, eps=eps)


def _check(x: Tensor, weight: Tensor) -> None:
    if not (weight.dim() == 1 and x.dim() >= 1 and (x.shape[-1] == weight.shape[0])):
        raise KernelError(f"weight has shape {tuple(weight.shape)}, x has {tuple(x.shape)}")
    if weight.shape[0] > MAX_WIDTH:
        raise KernelError(f"x has width {weight.shape[0]}; at most {MAX_WIDTH}")
    if not (x.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16, torch.float16)):
        raise KernelError(
            f"x is {x.dtype} and weight {weight.dtype}; both must be fp32, bf16 or fp16"
        )
    if x.device != weight.device:
        raise KernelError(f"x is on {x.device}, weight on {weight.device}")
