"""Plain reference of decode-mode attention over a plan's runs: one softmax per row, fp32."""

from collections.abc import Sequence

import torch
from torch import Tensor

from orthros_kernels.decode_attention.plan import KeyRun


def decode_attention_reference(
    q_RHD: Tensor,
    runs: Sequence[KeyRun],
    layer: int,
    *,
    cos_sin: tuple[Tensor, Tensor],
    scale: float,
    temperature_RH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each row to the keys that its runs and limits let it see.

    Args:
        q_RHD: Queries, not rotated.
        runs: As in the plan.
        layer: Index into the segments.
        cos_sin: Rotation of each entry, two fp32 [entries, D/2], runs one after another.
        scale: Softmax scale.
        temperature_RH: Factor on each row's and head's scores, or None.

    Returns:
        Output [R, H, D] and log-sum-exp [R, H], fp32.
    """
    num_rows, num_heads, head_dim = q_RHD.shape
    q_RHD = q_RHD.float()
    if temperature_RH is not None:
        q_RHD = q_RHD * temperature_RH[..., None]
    out = torch.empty(num_rows, num_heads, head_dim, device=q_RHD.device)
    lse = torch.empty(num_rows, num_heads, device=q_RHD.device)
    group = num_heads // runs[0].segments[0].shape[2]
    for row in range(num_rows):
        scores, values, entry = [], [], 0
        for run in runs:
            if row in run.rows:
                index = run.rows.index(row)
                k, v = _keys_values(run, layer)
                if run.limits is not None:
                    k, v = k[:, : run.limits[index]], v[:, : run.limits[index]]
                cos, sin = cos_sin[0][entry + index], cos_sin[1][entry + index]
                first, second = q_RHD[row].chunk(2, -1)
                turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
                k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
                scores.append(torch.einsum("hd,hnd->hn", turned, k) * scale)
                values.append(v)
            entry += len(run.rows)
        together = torch.cat(scores, 1)
        lse[row] = together.logsumexp(1)
        out[row] = torch.einsum("hn,hnd->hd", together.softmax(1), torch.cat(values, 1))
    return out, lse


def _keys_values(run: KeyRun, layer: int) -> tuple[Tensor, Tensor]:
    """One layer's keys and values of a run, [G, N, D] fp32."""
    parts = []
    for index, segment in enumerate(run.segments):
        part = segment[layer].float()
        if run.scales is not None:
            part = part * run.scales[index][layer, :, :, None, None]
        parts.append(part)
    both = torch.cat(parts, 2)
    return both[0], both[1]
