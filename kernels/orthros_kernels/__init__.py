"""Attention operators: tensors in, tensors out. Each has a plain reference beside its fast path."""

from orthros_kernels.attention_mass.op import attention_mass
from orthros_kernels.decode_attention.op import decode_attention
from orthros_kernels.decode_attention.plan import (
    DecodePlan,
    KeyRun,
    PlanSize,
    build_plan,
    move_plan,
    overwrite_plan,
)
from orthros_kernels.errors import Backend, KernelError, force_backend
from orthros_kernels.partial_attention.op import (
    causal_attention,
    full_attention,
    merge_partials,
    partial_attention,
)
from orthros_kernels.phase_attention.op import packed_phase_attention, phase_attention
from orthros_kernels.phase_attention.packed import PackedCarry, PackedSteps, next_carry, pack_steps
from orthros_kernels.phase_training.layout import DocumentSpan, PhaseLayout
from orthros_kernels.phase_training.op import phase_training_attention
from orthros_kernels.rms_norm.op import add_rms_norm, rms_norm
from orthros_kernels.rotary_write.op import rotary_scatter, rotary_write
from orthros_kernels.swiglu.op import swiglu

__all__ = [
    "Backend",
    "DecodePlan",
    "DocumentSpan",
    "KernelError",
    "KeyRun",
    "PackedCarry",
    "PackedSteps",
    "PhaseLayout",
    "PlanSize",
    "add_rms_norm",
    "attention_mass",
    "build_plan",
    "causal_attention",
    "decode_attention",
    "force_backend",
    "full_attention",
    "merge_partials",
    "move_plan",
    "next_carry",
    "overwrite_plan",
    "pack_steps",
    "packed_phase_attention",
    "partial_attention",
    "phase_attention",
    "phase_training_attention",
    "rms_norm",
    "rotary_scatter",
    "rotary_write",
    "swiglu",
]
