"""Partial softmax on the CPU through torch's fused attention, which returns the log-sum-exp."""

from collections.abc import Sequence

import torch
from torch import Tensor

from orthros_kernels.partial_attention.reference import Partial

# Fewer keys than this are not worth a split over threads.
_SPLIT_MIN_KEYS = 256
_SPLIT_MAX_ROWS = 64
_MERGE_AT_ONCE = 8


def flash_partial(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, bias: Tensor | None = None
) -> Partial:
    """Softmax with log-sum-exp of [.., G, R, D] queries over [.., G, N, D] keys; 3 or 4 dimensions.

    Args:
        q: Queries.
        k: Keys; read through their strides, never copied.
        v: Values.
        scale: Softmax scale.
        bias: Added to the scores, [R, N], dtype of q; -inf hides a key.

    Returns:
        Output in q's dtype and log-sum-exp in fp32.
    """
    has_batch = q.dim() == 4
    if not has_batch:
        q, k, v = q[None], k[None], v[None]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=None if bias is None else bias[None, None], scale=scale
    )
    return (out, lse) if has_batch else (out[0], lse[0])


def partial_attention_cpu(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> list[Partial]:
    """Attend [G, R, D] rows to every one of [G, N, D] keys; the partials are not merged yet.

    Few rows would leave threads idle, so the keys are split in as many pieces as there are threads.
    """
    num_pieces = torch.get_num_threads()
    num_kv_heads, num_keys, _ = k.shape
    if (
        q.shape[1] > _SPLIT_MAX_ROWS
        or num_pieces == 1
        or num_keys < _SPLIT_MIN_KEYS
        or num_keys % num_pieces
        or num_kv_heads % num_pieces == 0
    ):
        return [flash_partial(q, k, v, scale=scale)]
    outs, lses = flash_partial(
        q.expand(num_pieces, -1, -1, -1),
        _split_keys(k, num_pieces),
        _split_keys(v, num_pieces),
        scale=scale,
    )
    return list(zip(outs.unbind(), lses.unbind(), strict=True))


def merge_partials_cpu(partials: Sequence[Partial]) -> Partial:
    """One softmax over all runs, a few at a time: operations count when there are few rows."""
    merged = list(partials)
    while len(merged) > 1:
        group, rest = merged[:_MERGE_AT_ONCE], merged[_MERGE_AT_ONCE:]
        outs = torch.stack([out for out, _ in group])
        lses = torch.stack([lse for _, lse in group])
        highest = lses.amax(0)
        weights = (lses - highest).exp_()
        total = weights.sum(0)
        out = (outs * weights[..., None]).sum(0).div_(total[..., None])
        merged = [(out, highest + total.log_()), *((o.float(), lse) for o, lse in rest)]
    return merged[0]


def _split_keys(x: Tensor, num_pieces: int) -> Tensor:
    """View [G, N, D] as [pieces, G, N / pieces, D]."""
    num_kv_heads, num_keys, head_dim = x.shape
    per_piece = num_keys // num_pieces
    return x.as_strided(
        (num_pieces, num_kv_heads, per_piece, head_dim),
        (per_piece * x.stride(1), x.stride(0), x.stride(1), 1),
    )


def causal_attention_cpu(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Partial:
    """Attend [H, n, D] queries to the keys before them and themselves, [G, c + n, D]."""
    num_q_heads, num_tokens, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    group = num_q_heads // num_kv_heads
    rows = q.reshape(num_kv_heads, group * num_tokens, head_dim)
    if num_tokens == 1:
        out, lse = flash_partial(rows, k, v, scale=scale)
    elif num_tokens == num_keys:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None],
            k.repeat_interleave(group, 0)[None],
            v.repeat_interleave(group, 0)[None],
            0.0,
            True,
            scale=scale,
        )
    else:
        visible = torch.ones(num_tokens, num_keys, dtype=torch.bool).tril(num_keys - num_tokens)
        bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
        out, lse = flash_partial(rows, k, v, scale=scale, bias=bias.repeat(group, 1))
    return out.reshape(q.shape), lse.reshape(num_q_heads, num_tokens)
