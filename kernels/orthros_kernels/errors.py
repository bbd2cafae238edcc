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


def force_backend(backend: Backend) -> None:
    """Let "auto" mean one backend in this process; "auto" gives the choice back to the device.

    Raises:
        KernelError: The name is none of the three.
    """
    _check_name(backend)
    _forced[0] = backend


def resolve_backend(backend: Backend, x: Tensor) -> Literal["triton", "reference"]:
    """Triton for CUDA tensors, the reference for others, unless one is asked for or forced.

    Raises:
        KernelError: The name is none of the three.
    """
    _check_name(backend)
    chosen = _forced[0] if backend == "auto" else backend
    if chosen == "auto":
        return "triton" if x.is_cuda else "reference"
    return chosen


_forced: list[Backend] = ["auto"]


def _check_name(backend: str) -> None:
    check(
        backend in ("auto", "triton", "reference"),
        f"backend is {backend!r}; allowed are auto, triton and reference",
    )
