"""The phase mask over a packed row as dense matrices: plain, fp32, differentiable.

Shapes: T rows, H query heads, G KV heads, D head size.
"""

import torch
from torch import Tensor

from orthros_kernels.phase_training.layout import TILE, PhaseLayout


def phase_masks(layout: PhaseLayout, *, window: int, num_sinks: int) -> tuple[Tensor, Tensor]:
    """Which keys a row sees as sinks, and which by `q`: two bool [T, T], on the CPU.

    Rows of padding see nothing.
    """
    num_tokens = layout.num_tokens
    is_sink, is_seen = torch.zeros(2, num_tokens, num_tokens, dtype=torch.bool)
    for document in layout.documents:
        begin, end = document.start, document.end
        positions = torch.arange(document.num_tokens)
        row, key = positions[:, None], positions[None, :]
        is_past = key <= row
        in_window = (key >= row // TILE * TILE - window) & (key >= num_sinks)
        is_sink[begin:end, begin:end] = is_past & (key < num_sinks)
        is_seen[begin:end, begin:end] = is_past & in_window
        for start, length in document.segments:
            rows = slice(start, start + length)
            is_seen[rows, begin:end] = True
            is_seen[rows, rows] = torch.ones(length, length, dtype=torch.bool).tril()
    return is_sink, is_seen


def phase_training_reference(
    q_THD: Tensor,
    q_sink_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    layout: PhaseLayout,
    *,
    window: int,
    num_sinks: int,
    scale: float,
) -> Tensor:
    """`op.phase_training_attention` by two dense score matrices, [T, H, D] in q's dtype."""
    group = q_THD.shape[1] // k_TGD.shape[1]
    masks = phase_masks(layout, window=window, num_sinks=num_sinks)
    is_sink, is_seen = (mask.to(q_THD.device) for mask in masks)
    q, q_sink = (x.float().transpose(0, 1) for x in (q_THD, q_sink_THD))
    k, v = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (k_TGD, v_TGD))
    scores = torch.where(is_sink, q_sink @ k.transpose(1, 2), q @ k.transpose(1, 2)) * scale
    is_token = (is_sink | is_seen).any(1)[:, None]
    # A softmax over nothing is undefined: padding looks at everything and is then set to zero.
    hidden = ~(is_sink | is_seen) & is_token
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) * is_token
    return (weights @ v).transpose(0, 1).to(q_THD.dtype)
