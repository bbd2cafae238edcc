"""Plain reference of softmax over a run of keys with its log-sum-exp, and of merging such runs.

Shape suffixes: G KV heads, R rows (query heads of one KV head times queries), N keys, D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]


def partial_attention_reference(
    q_GRD: Tensor, k_GND: Tensor, v_GND: Tensor, *, scale: float, visible_RN: Tensor | None = None
) -> Partial:
    """Softmax over one run of keys in fp32; returns the output [G, R, D] and log-sum-exp [G, R]."""
    scores = q_GRD.float() @ k_GND.float().transpose(1, 2) * scale
    if visible_RN is not None:
        scores = scores.masked_fill(~visible_RN, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v_GND.float(), lse


def merge_pair(first: Partial, second: Partial) -> Partial:
    """One softmax over both runs, from their outputs and log-sum-exps; fp32."""
    lse = torch.logaddexp(first[1], second[1])
    out = (
        first[0] * (first[1] - lse).exp()[..., None]
        + second[0] * (second[1] - lse).exp()[..., None]
    )
    return out, lse


def merge_partials_reference(partials: Sequence[Partial]) -> Partial:
    """One softmax over all runs."""
    merged = partials[0]
    for partial in partials[1:]:
        merged = merge_pair(merged, partial)
    return merged
