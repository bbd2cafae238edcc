"""Plain reference of prefill-mode attention: dense masks, fp32, one call for a whole document.

Shape suffixes: H query heads, G KV heads, N tokens, D head size. Formulas: docs/architecture.md,
"The attention".
"""

from itertools import pairwise

import torch
from torch import Tensor

from orthros_kernels.phase_attention.packed import PackedCarry, PackedSteps


def window_start(position: Tensor, *, tile: int, window: int) -> Tensor:
    """First position inside each query's block-aligned window; negative while it is not full."""
    return torch.div(position, tile, rounding_mode="floor") * tile - window


def prefill_mask(num_tokens: int, *, tile: int, window: int, num_sinks: int) -> Tensor:
    """Boolean [N, N] mask, true where query i may see key j: sinks or window, and causal."""
    position = torch.arange(num_tokens)
    query, key = position[:, None], position[None, :]
    start = window_start(position, tile=tile, window=window)[:, None]
    return ((key < num_sinks) | (key >= start)) & (key <= query)


def phase_attention_reference(
    q_HND: Tensor,
    q_sink_HND: Tensor,
    k_GND: Tensor,
    v_GND: Tensor,
    *,
    window: int,
    tile: int,
    num_sinks: int,
    scale: float,
) -> Tensor:
    """Attend every document token to the sinks and its window.

    Args:
        q_HND: Queries rotated at their own positions.
        q_sink_HND: The same queries rotated at min(position, window + tile + num_sinks - 1); they
            score the sinks.
        k_GND: Rotated keys.
        v_GND: Values.
        window: Tokens of the window left of the query's own tile; a multiple of `tile`.
        tile: Tokens per tile.
        num_sinks: First tokens that every query sees.
        scale: Softmax scale, usually D ** -0.5.

    Returns:
        [H, N, D] fp32.
    """
    group = q_HND.shape[0] // k_GND.shape[0]
    k_HND = k_GND.float().repeat_interleave(group, 0)
    v_HND = v_GND.float().repeat_interleave(group, 0)
    num_tokens = q_HND.shape[1]
    scores = q_HND.float() @ k_HND.transpose(1, 2) * scale
    sink_scores = q_sink_HND.float() @ k_HND.transpose(1, 2) * scale
    device = q_HND.device
    is_sink = torch.arange(num_tokens, device=device) < num_sinks
    scores = torch.where(is_sink, sink_scores, scores)
    mask = prefill_mask(num_tokens, tile=tile, window=window, num_sinks=num_sinks).to(device)
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v_HND


def packed_phase_attention_reference(
    q_THD: Tensor,
    k_GTD: Tensor,
    v_GTD: Tensor,
    steps: PackedSteps,
    *,
    carry: PackedCarry | None,
    cos_sin: tuple[Tensor, Tensor],
    sink_cos_sin: tuple[Tensor, Tensor],
    num_sinks: int,
    scale: float,
) -> Tensor:
    """`op.packed_phase_attention` step by step: one dense masked softmax each, [T, H, D]."""
    out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    group = q_THD.shape[1] // k_GTD.shape[0]
    for index, (begin, end) in enumerate(pairwise(steps.cu_seqlens)):
        start, num_tokens = steps.starts[index], end - begin
        seen = steps.context_tokens(index)
        k, v = k_GTD[:, begin:end], v_GTD[:, begin:end]
        sinks = k[:, :num_sinks], v[:, :num_sinks]
        if carry is not None and start:
            context = slice(steps.cu_context[index], steps.cu_context[index + 1])
            k = torch.cat((carry.k_context[:, context], k), 1)
            v = torch.cat((carry.v_context[:, context], v), 1)
            sinks = carry.k_sinks[index], carry.v_sinks[index]
        positions = torch.arange(start, start + num_tokens, device=q_THD.device)
        keys = torch.arange(start - seen, start + num_tokens, device=q_THD.device)
        first = window_start(positions, tile=steps.tile, window=steps.window)[:, None]
        in_window = (keys >= first) & (keys >= num_sinks) & (keys <= positions[:, None])
        is_sink = torch.arange(sinks[0].shape[1], device=q_THD.device) <= positions[:, None]
        q_HND = q_THD[begin:end].float().transpose(0, 1)
        clamped = positions.clamp(max=sink_cos_sin[0].shape[0] - 1)
        turned = _rotated(q_HND, cos_sin[0][begin:end], cos_sin[1][begin:end])
        for_sinks = _rotated(q_HND, sink_cos_sin[0][clamped], sink_cos_sin[1][clamped])
        scores = torch.cat(
            (
                (for_sinks @ _per_query_head(sinks[0], group).transpose(1, 2)),
                (turned @ _per_query_head(k, group).transpose(1, 2)),
            ),
            2,
        )
        hidden = ~torch.cat((is_sink, in_window), 1)
        weights = torch.softmax((scores * scale).masked_fill(hidden, -torch.inf), -1)
        values = torch.cat((_per_query_head(sinks[1], group), _per_query_head(v, group)), 1)
        out[begin:end] = (weights @ values).transpose(0, 1).to(out.dtype)
    return out


def _per_query_head(x_GND: Tensor, group: int) -> Tensor:
    return x_GND.float().repeat_interleave(group, 0)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation with cos and sin of half a head's width."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
