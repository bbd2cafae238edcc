"""The one error of the kernels, and the choice between a kernel and its plain reference."""

from typing import Literal

from torch import Tensor

Backend = Literal["auto", "triton", "reference"]


class KernelError(ValueError):
    """An argument has a shape, dtype or device that is not taken; the message names it."""


def check(condition: bool, message: str) -> None:
    """Raise `KernelError` with this message unless the condition holds."""
    if not condition:
        raise KernelError(message)


def resolve_backend(backend: Backend, x: Tensor) -> Literal["triton", "reference"]:
    """Triton for CUDA tensors, the reference for others, unless one is asked for.

    Raises:
        KernelError: The name is none of the three.
    """
    check(
        backend in ("auto", "triton", "reference"),
        f"backend is {backend!r}; allowed are auto, triton and reference",
    )
    if backend == "auto":
        return "triton" if x.is_cuda else "reference"
    return backend
