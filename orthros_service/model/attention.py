"""Orthros attention: one set of projections, two computation patterns; `attend` switches.

Shape suffixes as in batches.py. q and k come without rotation; k is rotated here and kept rotated
at positions local
to its document.
"""

import torch
from torch import Tensor

from orthros_kernels import (
    causal_attention,
    full_attention,
    merge_partials,
    partial_attention,
    phase_attention,
)
from orthros_service.model.batches import (
    DecodeBatch,
    PrefillBatch,
    PrivateTail,
    SharedContext,
)
from orthros_service.model.rope import rotate

TEMPERATURE_START = 8192
"""Context length, in tokens, from which a decode temperature acts."""


def attend(
    layer: int,
    q_HRD: Tensor,
    k_GRD: Tensor,
    v_GRD: Tensor,
    batch: PrefillBatch | DecodeBatch,
    *,
    temperature_H: Tensor | None,
) -> Tensor:
    """Attention of one layer in the phase that the batch names; its keys and values are stored.

    Args:
        layer: Index into the K/V buffers.
        q_HRD: Queries, not rotated.
        k_GRD: Keys, not rotated.
        v_GRD: Values.
        batch: The phase and its context.
        temperature_H: c_h of this layer for decode mode, or None.

    Returns:
        [H, R, D] in q's dtype.
    """
    match batch:
        case PrefillBatch():
            return _attend_prefill(layer, q_HRD, k_GRD, v_GRD, batch)
        case DecodeBatch():
            return _attend_decode(layer, q_HRD, k_GRD, v_GRD, batch, temperature_H)


def write_keys_values(
    layer: int, k_GRD: Tensor, v_GRD: Tensor, batch: PrefillBatch | DecodeBatch
) -> None:
    """Rotate and store keys and values: all that the last layer's document tokens need."""
    rotated = rotate(k_GRD, *batch.cos_sin)
    match batch:
        case PrefillBatch():
            batch.kv_out[layer, 0].copy_(rotated)
            batch.kv_out[layer, 1].copy_(v_GRD)
        case DecodeBatch():
            for tail in batch.tails:
                rows = slice(tail.first_row, tail.first_row + tail.num_rows)
                end = tail.length + tail.num_rows
                k_tail, v_tail = tail.layers[layer]
                k_tail[:, tail.length : end] = rotated[:, rows]
                v_tail[:, tail.length : end] = v_GRD[:, rows]


def _attend_prefill(
    layer: int, q_HND: Tensor, k_GND: Tensor, v_GND: Tensor, batch: PrefillBatch
) -> Tensor:
    write_keys_values(layer, k_GND, v_GND, batch)
    k_step, v_step = batch.kv_out[layer, 0], batch.kv_out[layer, 1]
    if batch.carry is None:
        sinks = batch.kv_out[layer, :, :, : batch.num_sinks]
        k_seen, v_seen = k_step, v_step
    else:
        sinks = batch.carry.sinks[layer]
        k_seen = torch.cat((batch.carry.window[layer, 0], k_step), 1)
        v_seen = torch.cat((batch.carry.window[layer, 1], v_step), 1)
    return phase_attention(
        rotate(q_HND, *batch.cos_sin),
        rotate(q_HND, *batch.sink_cos_sin),
        k_seen,
        v_seen,
        k_sinks=sinks[0],
        v_sinks=sinks[1],
        start=batch.start,
        window=batch.window,
        tile=batch.tile,
        scale=q_HND.shape[-1] ** -0.5,
    )


def _attend_decode(
    layer: int,
    q_HRD: Tensor,
    k_GRD: Tensor,
    v_GRD: Tensor,
    batch: DecodeBatch,
    temperature_H: Tensor | None,
) -> Tensor:
    write_keys_values(layer, k_GRD, v_GRD, batch)
    if temperature_H is not None and batch.log_length_R is not None:
        tau_HR = 1 + temperature_H[:, None] * batch.log_length_R
        q_HRD = (q_HRD * tau_HR[..., None]).to(q_HRD.dtype)
    q_rotated = rotate(q_HRD, *batch.cos_sin)
    has_evidence = batch.evidence is not None and layer in batch.evidence.layers
    if _is_one_token(batch) and not has_evidence:
        return _attend_one_token(layer, q_rotated, batch).to(q_HRD.dtype)
    out, lse = _attend_tails(layer, q_rotated, batch.tails)
    for document in batch.documents:
        out, lse = _attend_document(layer, q_HRD, q_rotated, document, out, lse)
    if batch.evidence is not None and has_evidence:
        batch.evidence.queries[layer] = q_HRD
        batch.evidence.lse[layer] = lse
    return out.to(q_HRD.dtype)


def _is_one_token(batch: DecodeBatch) -> bool:
    """Whether one new token sees everything under one rotation: a lone sequence on one document."""
    return (
        len(batch.tails) == 1
        and batch.tails[0].num_rows == 1
        and all(d.rows is None and d.cos_sin is None for d in batch.documents)
    )


def _attend_one_token(layer: int, q_H1D: Tensor, batch: DecodeBatch) -> Tensor:
    """One softmax over documents and tail: nothing to mask, nothing to merge."""
    tail = batch.tails[0]
    end = tail.length + 1
    k_tail, v_tail = tail.layers[layer]
    runs = [run for document in batch.documents for run in document.layers[layer]]
    runs.append((k_tail[:, :end], v_tail[:, :end]))
    grouped = q_H1D.reshape(k_tail.shape[0], -1, q_H1D.shape[-1])
    return full_attention(grouped, runs, scale=q_H1D.shape[-1] ** -0.5).reshape(q_H1D.shape)


def _attend_tails(
    layer: int, q_HRD: Tensor, tails: tuple[PrivateTail, ...]
) -> tuple[Tensor, Tensor]:
    """Each sequence's own tokens; rows of all sequences side by side."""
    scale = q_HRD.shape[-1] ** -0.5
    parts = []
    for tail in tails:
        rows = slice(tail.first_row, tail.first_row + tail.num_rows)
        end = tail.length + tail.num_rows
        k_tail, v_tail = tail.layers[layer]
        parts.append(
            causal_attention(q_HRD[:, rows], k_tail[:, :end], v_tail[:, :end], scale=scale)
        )
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def _attend_document(
    layer: int, q_HRD: Tensor, q_rotated: Tensor, document: SharedContext, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge one document into the rows that see it; each segment is read once for all."""
    rows = document.rows
    if document.cos_sin is None:
        q = q_rotated if rows is None else q_rotated[:, rows]
    else:
        q = rotate(q_HRD if rows is None else q_HRD[:, rows], *document.cos_sin)
    num_kv_heads = document.layers[layer][0][0].shape[0]
    grouped = q.reshape(num_kv_heads, -1, q.shape[-1])
    scale = q.shape[-1] ** -0.5
    own = (out, lse) if rows is None else (out[:, rows], lse[:, rows])
    merged_out, merged_lse = merge_partials(
        [
            (own[0].reshape(grouped.shape), own[1].reshape(grouped.shape[:2])),
            partial_attention(grouped, document.layers[layer], scale=scale),
        ]
    )
    merged_out, merged_lse = merged_out.reshape(q.shape), merged_lse.reshape(q.shape[:2])
    if rows is None:
        return merged_out, merged_lse
    out = out.float().index_copy(1, rows, merged_out)
    return out, lse.index_copy(1, rows, merged_lse)


def log_length(
    positions: Tensor, temperature: tuple[tuple[float, ...], ...] | None
) -> Tensor | None:
    """ln(max(1, t / TEMPERATURE_START)), t counted from 1; None without temperatures."""
    if temperature is None:
        return None
    return ((positions + 1).float() / TEMPERATURE_START).clamp(min=1).log()
