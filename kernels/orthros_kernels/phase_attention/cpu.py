"""Prefill-mode attention on the CPU: block-sparse, memory linear in the step, no N x N mask."""

import torch
from torch import Tensor

from orthros_kernels.partial_attention.cpu import flash_partial
from orthros_kernels.partial_attention.reference import merge_pair


def phase_attention_cpu(
    q: Tensor,
    q_sink: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_sinks: Tensor,
    v_sinks: Tensor,
    start: int,
    window: int,
    tile: int,
    scale: float,
) -> Tensor:
    """See `op.phase_attention`; k and v hold the context followed by the step's own tokens."""
    num_tokens = q.shape[1]
    context = k.shape[1] - num_tokens
    # Up to here every earlier token lies inside the window, so prefill mode is plain causal
    # attention.
    head_tokens = max(0, min(num_tokens, window + tile - start))
    out = torch.empty_like(q)
    if head_tokens:
        out[:, :head_tokens] = _dense_head(q, k, v, head_tokens, context, scale)
    body_tiles = (num_tokens - head_tokens) // tile
    body_end = head_tokens + body_tiles * tile
    runs = [(head_tokens, body_tiles, tile)] if body_tiles else []
    if body_end < num_tokens:
        runs.append((body_end, 1, num_tokens - body_end))
    for begin, num_tiles, rows in runs:
        piece = slice(begin, begin + num_tiles * rows)
        first_key = context + begin - window
        windowed = _window_tiles(q, k, v, begin, first_key, num_tiles, rows, window, tile, scale)
        out[:, piece] = _add_sinks(windowed, q_sink[:, piece], k_sinks, v_sinks, scale).to(q.dtype)
    return out


def _dense_head(q: Tensor, k: Tensor, v: Tensor, rows: int, context: int, scale: float) -> Tensor:
    """Causal attention of the step's first rows over context and themselves, [H, rows, D]."""
    num_keys = context + rows
    grouped = _group_heads(q[:, :rows], k.shape[0])
    group = q.shape[0] // k.shape[0]
    visible = torch.ones(rows, num_keys, dtype=torch.bool).tril(context)
    bias = torch.zeros(rows, num_keys, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
    out, _ = flash_partial(
        grouped, k[:, :num_keys], v[:, :num_keys], scale=scale, bias=bias.repeat(group, 1)
    )
    return out.reshape(q.shape[0], rows, -1)


def _window_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: int,
    first_key: int,
    num_tiles: int,
    rows: int,
    window: int,
    tile: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Window attention of whole tiles at once: overlapping key slabs are views, not copies.

    Returns:
        Output [H, num_tiles * rows, D] and log-sum-exp [H, num_tiles * rows] of the window part.
    """
    num_q_heads, _, head_dim = q.shape
    num_kv_heads = k.shape[0]
    group = num_q_heads // num_kv_heads
    slab_shape = (num_tiles, num_kv_heads, window + rows, head_dim)
    k_slab, v_slab = (
        x[:, first_key:].as_strided(
            slab_shape,
            (tile * x.stride(1), x.stride(0), x.stride(1), 1),
            x[:, first_key:].storage_offset(),
        )
        for x in (k, v)
    )
    q_tiles = (
        q[:, begin : begin + num_tiles * rows]
        .reshape(num_kv_heads, group, num_tiles, rows, head_dim)
        .permute(2, 0, 1, 3, 4)
        .reshape(num_tiles, num_kv_heads, group * rows, head_dim)
    )
    visible = torch.ones(rows, window + rows, dtype=torch.bool).tril(window)
    bias = torch.zeros(rows, window + rows, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
    out, lse = flash_partial(q_tiles, k_slab, v_slab, scale=scale, bias=bias.repeat(group, 1))
    out = out.reshape(num_tiles, num_kv_heads, group, rows, head_dim).permute(1, 2, 0, 3, 4)
    lse = lse.reshape(num_tiles, num_kv_heads, group, rows).permute(1, 2, 0, 3)
    return (
        out.reshape(num_q_heads, num_tiles * rows, head_dim),
        lse.reshape(num_q_heads, num_tiles * rows),
    )


def _add_sinks(
    windowed: tuple[Tensor, Tensor], q_sink: Tensor, k_sinks: Tensor, v_sinks: Tensor, scale: float
) -> Tensor:
    """Merge the window's partial softmax with that over the sink tokens; fp32."""
    if k_sinks.shape[1] == 0:
        return windowed[0]
    grouped = _group_heads(q_sink, k_sinks.shape[0])
    scores = torch.matmul(grouped, k_sinks.transpose(1, 2)).float() * scale
    lse = scores.logsumexp(-1)
    out = torch.matmul((scores - lse[..., None]).exp().to(v_sinks.dtype), v_sinks)
    merged, _ = merge_pair(windowed, (out.reshape(q_sink.shape), lse.reshape(q_sink.shape[:2])))
    return merged


def _group_heads(q: Tensor, num_kv_heads: int) -> Tensor:
    """[H, n, D] -> [G, H/G * n, D]: the query heads of one KV head become rows of one product."""
    return q.reshape(num_kv_heads, -1, q.shape[-1])
