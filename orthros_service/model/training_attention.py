"""Orthros attention while training: prefill mode and decode mode in one differentiable call."""

from torch import Tensor

from orthros_kernels import phase_training_attention
from orthros_service.model.batches import TrainingBatch
from orthros_service.model.rope import rotate


def attend_training(q_RHD: Tensor, k_RGD: Tensor, v_RGD: Tensor, batch: TrainingBatch) -> Tensor:
    """Attention of one layer over a packed row.

    Args:
        q_RHD: Queries, not rotated.
        k_RGD: Keys, not rotated.
        v_RGD: Values.
        batch: Where documents and segments lie.

    Returns:
        [R, H, D] in q's dtype.
    """
    return phase_training_attention(
        rotate(q_RHD, *batch.cos_sin),
        rotate(q_RHD, *batch.sink_cos_sin),
        rotate(k_RGD, *batch.cos_sin),
        v_RGD,
        batch.layout,
        window=batch.window,
        num_sinks=batch.num_sinks,
        scale=q_RHD.shape[-1] ** -0.5,
    )
