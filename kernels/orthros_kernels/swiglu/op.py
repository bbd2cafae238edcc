"""SwiGLU: checks and dispatch."""

import torch
from torch import Tensor

from orthros_kernels.errors import Backend, KernelError, resolve_backend
from orthros_kernels.swiglu.reference import swiglu_reference


def swiglu(gate_up: Tensor, *, backend: Backend = "auto") -> Tensor:
    """silu(gate) * up, where the two halves of each row are gate and up.

    Args:
        gate_up: [R, 2 I], fp32, bf16 or fp16; any row stride.
        backend: "auto" takes Triton on CUDA and torch elsewhere.

    Returns:
        [R, I] in the same dtype; the Triton kernel rounds once, torch after each operation.

    Raises:
        KernelError: The shape or dtype is not as above.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """
    if not (gate_up.dim() == 2 and gate_up.shape[1] > 0 and (gate_up.shape[1] % 2 == 0)):
        raise KernelError(f"gate_up has shape {tuple(gate_up.shape)}; [R, 2 I] is needed")
    if gate_up.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise KernelError(f"gate_up is {gate_up.dtype}; fp32, bf16 and fp16 are taken")
    if gate_up.stride(1) != 1:
        raise KernelError("gate_up must have unit stride in its last dimension")
    if resolve_backend(backend, gate_up) == "triton":
        from orthros_kernels.swiglu.triton_kernel import swiglu_triton

        return swiglu_triton(gate_up)
    return swiglu_reference(gate_up)
