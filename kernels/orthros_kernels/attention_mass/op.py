"""Attention mass per key, for the evidence pass."""

from torch import Tensor

from orthros_kernels.attention_mass.reference import attention_mass_reference
from orthros_kernels.errors import Backend, check, resolve_backend


def attention_mass(
    q: Tensor, k: Tensor, lse: Tensor, *, scale: float, backend: Backend = "auto"
) -> Tensor:
    """Sum, over heads and rows, of the probability that each key receives.

    Args:
        q: Rotated queries, [G, R, D].
        k: Keys of one run, [G, N, D].
        lse: Log-sum-exp of each row over the whole context, [G, R] fp32: it makes the masses of
            several runs add up.
        scale: Softmax scale.
        backend: "auto" takes Triton on CUDA and the reference elsewhere.

    Returns:
        [N] fp32.

    Raises:
        KernelError: Shapes do not fit.
    """
    check(q.shape[:2] == lse.shape, f"lse has shape {tuple(lse.shape)}, q has {tuple(q.shape)}")
    check(
        q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1],
        f"k has shape {tuple(k.shape)}, q has {tuple(q.shape)}",
    )
    check(k.stride(-1) == 1, "k must have unit stride in its last dimension")
    check(q.dtype == k.dtype, f"q is {q.dtype}, k is {k.dtype}")
    if resolve_backend(backend, q) == "triton":
        from orthros_kernels.attention_mass.triton_kernel import attention_mass_triton

        return attention_mass_triton(q, k, lse, scale=scale)
    return attention_mass_reference(q, k, lse, scale=scale)
