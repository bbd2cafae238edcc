"""Plain reference of SwiGLU."""

import torch
from torch import Tensor


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [R, 2 I] -> [R, I]."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
