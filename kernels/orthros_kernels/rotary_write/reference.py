"""Plain reference: keys and values of a fused projection, keys rotated."""

import torch
from torch import Tensor


def keys_values_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    k_norm: tuple[Tensor, float] | None,
) -> tuple[Tensor, Tensor]:
    """Rotated keys and plain values, [G, R, D] each, in qkv's dtype.

    Args:
        qkv: [R, (H + 2 G) * D].
        cos: fp32 [R, D/2].
        sin: Like cos.
        num_q_heads: H.
        num_kv_heads: G.
        k_norm: Weight [D] and epsilon of a norm over each key, or None.
    """
    head_dim = 2 * cos.shape[1]
    heads = qkv.reshape(qkv.shape[0], num_q_heads + 2 * num_kv_heads, head_dim).transpose(0, 1)
    k, v = heads[num_q_heads : num_q_heads + num_kv_heads], heads[num_q_heads + num_kv_heads :]
    if k_norm is not None:
        k = torch.nn.functional.rms_norm(k, k_norm[0].shape, *k_norm)
    first, second = k.float().chunk(2, -1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return rotated.to(qkv.dtype), v
