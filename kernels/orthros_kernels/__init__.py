"""Attention operators: tensors in, tensors out. Each has a plain reference beside its fast path."""

from orthros_kernels.attention_mass.op import attention_mass
from orthros_kernels.errors import KernelError
from orthros_kernels.partial_attention.op import (
    causal_attention,
    full_attention,
    merge_partials,
    partial_attention,
)
from orthros_kernels.phase_attention.op import phase_attention

__all__ = [
    "KernelError",
    "attention_mass",
    "causal_attention",
    "full_attention",
    "merge_partials",
    "partial_attention",
    "phase_attention",
]
