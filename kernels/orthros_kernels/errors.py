"""The one error of the kernels, and the choice between a kernel and its plain reference."""

from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "reference"]


class KernelError(ValueError):
    """An argument has a shape, dtype or device that is not taken; the message names it."""


def check(condition: bool, message: str) -> None:
    """Raise `KernelError` with this message unless the condition holds.

    Not for what runs in every layer of a step: the message is made each time.
    """
    if not condition:
        raise KernelError(message)


def force_backend(backend: Backend) -> None:
    """Let "auto" mean one backend in this process; "auto" gives the choice back to the device.

    Raises:
        KernelError: The name is none of the three.
    """
    _check_name(backend)
    _forced[0] = backend


def resolve_backend(
    backend: Backend, x: Tensor, *, has_gradients: bool = False
) -> Literal["triton", "reference"]:
    """Triton for CUDA tensors, the reference for others, unless one is asked for or forced.

    Where a gradient is wanted, "auto" takes a Triton kernel only if it has one: the others would
    cut the graph without a word.

    Args:
        backend: What the caller asks for.
        x: The input whose device decides.
        has_gradients: Whether the operator's Triton form is differentiable.

    Raises:
        KernelError: The name is none of the three.
    """
    _check_name(backend)
    chosen = _forced[0] if backend == "auto" else backend
    if chosen == "auto":
        is_cut = x.requires_grad and torch.is_grad_enabled() and not has_gradients
        return "triton" if x.is_cuda and not is_cut else "reference"
    return chosen


_forced: list[Backend] = ["auto"]


def _check_name(backend: str) -> None:
    check(
        backend in ("auto", "triton", "reference"),
        f"backend is {backend!r}; allowed are auto, triton and reference",
    )
