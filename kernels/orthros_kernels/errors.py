"""The one error of the kernels."""


class KernelError(ValueError):
    """An argument has a shape, dtype or device that is not taken; the message names it."""


def check(condition: bool, message: str) -> None:
    """Raise `KernelError` with this message unless the condition holds."""
    if not condition:
        raise KernelError(message)
