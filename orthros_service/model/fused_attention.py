"""Orthros attention on CUDA: `attention.attend` with the Triton kernels.

The projection's output goes in as it is: keys are rotated while they are written to their place,
queries while the attention kernel loads them. Shape suffixes as in batches.py.
"""

from dataclasses import dataclass

from torch import Tensor

from orthros_kernels import (
    PackedCarry,
    decode_attention,
    packed_phase_attention,
    rms_norm,
    rotary_scatter,
    rotary_write,
)
from orthros_service.model.batches import FusedBatch, PackedPrefillBatch, PlannedDecodeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Weights [D] of the norms over single heads (Qwen 3), and their epsilon."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


def attend_fused(
    layer: int,
    qkv_RF: Tensor,
    batch: FusedBatch,
    *,
    heads: tuple[int, int, int],
    head_dim: int,
    norms: HeadNorms | None,
) -> Tensor:
    """Attention of one layer; its keys and values are stored.

    Args:
        layer: Index into the K/V buffers.
        qkv_RF: The fused projection, [R, (H + 2 G) * D].
        batch: The phase and its context.
        heads: H, G, G.
        head_dim: D.
        norms: Head norms, or None.

    Returns:
        [R, H, D].
    """
    write_fused(layer, qkv_RF, batch, heads=heads, norms=norms)
    q_RHD = qkv_RF.view(qkv_RF.shape[0], sum(heads), head_dim)[:, : heads[0]]
    if norms is not None:
        q_RHD = rms_norm(q_RHD, norms.q_weight, eps=norms.eps)
    match batch:
        case PackedPrefillBatch():
            return _attend_prefill(layer, q_RHD, batch)
        case PlannedDecodeBatch():
            return _attend_decode(layer, q_RHD, batch)


def write_fused(
    layer: int,
    qkv_RF: Tensor,
    batch: FusedBatch,
    *,
    heads: tuple[int, int, int],
    norms: HeadNorms | None,
) -> None:
    """Rotate and store keys and values: all that the last layer's document tokens need."""
    k_norm = None if norms is None else (norms.k_weight, norms.eps)
    match batch:
        case PackedPrefillBatch():
            rotary_write(
                qkv_RF,
                *batch.cos_sin,
                k_out=batch.kv_out[layer, 0],
                v_out=batch.kv_out[layer, 1],
                num_q_heads=heads[0],
                k_norm=k_norm,
            )
        case PlannedDecodeBatch():
            rotary_scatter(
                qkv_RF,
                *batch.row_cos_sin,
                base_addresses=batch.tail_addresses,
                capacities=batch.tail_capacities,
                rows=batch.tail_rows,
                layer=layer,
                num_q_heads=heads[0],
                num_kv_heads=heads[1],
                k_norm=k_norm,
            )


def _attend_prefill(layer: int, q_NHD: Tensor, batch: PackedPrefillBatch) -> Tensor:
    carry = batch.carry
    return packed_phase_attention(
        q_NHD,
        batch.kv_out[layer, 0],
        batch.kv_out[layer, 1],
        batch.steps,
        carry=None
        if carry is None
        else PackedCarry(
            k_context=carry.window[layer, 0],
            v_context=carry.window[layer, 1],
            k_sinks=carry.sinks[layer, 0][None],
            v_sinks=carry.sinks[layer, 1][None],
        ),
        cos_sin=batch.cos_sin,
        sink_cos_sin=batch.sink_cos_sin,
        num_sinks=batch.num_sinks,
        scale=q_NHD.shape[-1] ** -0.5,
    )


def _attend_decode(layer: int, q_RHD: Tensor, batch: PlannedDecodeBatch) -> Tensor:
    has_temperature = batch.temperature_LH is not None
    out, lse_RH = decode_attention(
        q_RHD,
        batch.plan,
        layer,
        cos_sin=batch.entry_cos_sin,
        scale=q_RHD.shape[-1] ** -0.5,
        log_length=batch.log_length_R if has_temperature else None,
        temperature=None if batch.temperature_LH is None else batch.temperature_LH[layer],
    )
    if batch.evidence is not None and layer in batch.evidence.layers:
        batch.evidence.queries[layer] = q_RHD.transpose(0, 1)
        batch.evidence.lse[layer] = lse_RH.transpose(0, 1)
    return out
