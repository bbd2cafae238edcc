"""Partial softmax on the CPU through torch's fused attention, which returns the log-sum-exp."""

from collections.abc import Sequence

import torch
from torch import Tensor

from orthros_kernels.partial_attention.reference import Partial

KeysValues = tuple[Tensor, Tensor]

# Up to this many rows per KV head, plain products beat the fused kernel (2 cores, AVX-512 bf16).
_NARROW_MAX_ROWS = 32
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


def partial_attention_cpu(q: Tensor, runs: Sequence[KeysValues], *, scale: float) -> Partial:
    """Attend [G, R, D] rows to every key of all runs, each [G, N, D]."""
    if q.shape[1] > _NARROW_MAX_ROWS:
        return merge_partials_cpu([flash_partial(q, k, v, scale=scale) for k, v in runs])
    return _narrow_attention(q, runs, scale)


def _narrow_attention(q: Tensor, runs: Sequence[KeysValues], scale: float) -> Partial:
    """Few rows: plain products per run around one softmax over all of them.

    The fused kernel is built for many rows; with a handful it is bound by its small blocks. Scores
    are rounded to q's dtype here, which on real text changes the model's output by less than its
    bf16 weights do.
    """
    scores = _scores(q, runs, scale).float()
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1)
    out = _weighted_values(weights.to(q.dtype), runs)
    return out.div_(total[..., None]), highest[..., 0] + total.log()


def full_attention_cpu(q: Tensor, runs: Sequence[KeysValues], *, scale: float) -> Tensor:
    """`partial_attention_cpu` without log-sum-exp: one fused softmax for a few rows."""
    if q.shape[1] > _NARROW_MAX_ROWS:
        return partial_attention_cpu(q, runs, scale=scale)[0]
    return _weighted_values(_scores(q, runs, scale).softmax(-1), runs)


def _scores(q: Tensor, runs: Sequence[KeysValues], scale: float) -> Tensor:
    """Scaled scores of all runs side by side, [G, R, sum of N], in q's dtype."""
    scaled = q * scale
    parts = [torch.bmm(scaled, k.transpose(1, 2)) for k, _ in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _weighted_values(weights: Tensor, runs: Sequence[KeysValues]) -> Tensor:
    """Sum over runs of weights times values, [G, R, D] fp32."""
    parts = torch.split(weights, [k.shape[1] for k, _ in runs], -1)
    out = torch.bmm(parts[0], runs[0][1]).float()
    for part, (_, v) in zip(parts[1:], runs[1:], strict=True):
        out += torch.bmm(part, v)
    return out


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
