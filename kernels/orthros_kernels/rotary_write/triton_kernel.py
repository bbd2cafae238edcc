"""Keys and values to their place on CUDA: read once from the projection, written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _rotary_write_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    k_ptr,
    v_ptr,
    addresses_ptr,
    capacities_ptr,
    places_ptr,
    num_rows,
    qkv_stride,
    k_head_stride,
    k_row_stride,
    v_head_stride,
    v_row_stride,
    layer,
    eps,
    FIRST_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    IS_SCATTER: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TYPE: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, HALF_BLOCK)
    is_row = rows < num_rows
    is_there = is_row[:, None] & (half < HALF)[None, :]
    k_at = qkv_ptr + rows[:, None] * qkv_stride + (FIRST_HEAD + head) * HEAD_DIM + half[None, :]
    v_at = k_at + KV_HEADS * HEAD_DIM
    first = tl.load(k_at, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(k_at + HALF, mask=is_there, other=0.0).to(tl.float32)
    v_first = tl.load(v_at, mask=is_there, other=0.0)
    v_second = tl.load(v_at + HALF, mask=is_there, other=0.0)
    if HAS_NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        is_half = half < HALF
        low = tl.load(norm_ptr + half, mask=is_half, other=0.0).to(tl.float32)
        high = tl.load(norm_ptr + HALF + half, mask=is_half, other=0.0).to(tl.float32)
        # Rounded between norm and rotation, as the plain model does.
        first = (first * scale * low[None, :]).to(TYPE).to(tl.float32)
        second = (second * scale * high[None, :]).to(TYPE).to(tl.float32)
    angle = rows[:, None] * HALF + half[None, :]
    cos = tl.load(cos_ptr + angle, mask=is_there, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=is_there, other=0.0)
    k_first = (first * cos - second * sin).to(TYPE)
    k_second = (second * cos + first * sin).to(TYPE)
    if IS_SCATTER:
        address = tl.load(addresses_ptr + rows, mask=is_row, other=0)
        capacity = tl.load(capacities_ptr + rows, mask=is_row, other=0)
        place = tl.load(places_ptr + rows, mask=is_row, other=0)
        k_head = ((layer * 2) * KV_HEADS + head) * capacity + place
        k_out = address.to(tl.pointer_type(TYPE))[:, None] + k_head[:, None] * HEAD_DIM
        v_out = k_out + (KV_HEADS * capacity)[:, None] * HEAD_DIM
    else:
        k_out = k_ptr + head.to(tl.int64) * k_head_stride + rows[:, None] * k_row_stride
        v_out = v_ptr + head.to(tl.int64) * v_head_stride + rows[:, None] * v_row_stride
    tl.store(k_out + half[None, :], k_first, mask=is_there)
    tl.store(k_out + HALF + half[None, :], k_second, mask=is_there)
    tl.store(v_out + half[None, :], v_first, mask=is_there)
    tl.store(v_out + HALF + half[None, :], v_second, mask=is_there)


def rotary_write_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    k_out: Tensor,
    v_out: Tensor,
    num_q_heads: int,
    k_norm: tuple[Tensor, float] | None,
    rows: int = 32,
) -> None:
    """See `op.rotary_write`."""
    num_kv_heads = k_out.shape[0]
    num_rows, head_dim = qkv.shape[0], 2 * cos.shape[1]
    _rotary_write_kernel[(triton.cdiv(num_rows, rows), num_kv_heads)](
        qkv, cos, sin, cos if k_norm is None else k_norm[0], k_out, v_out, cos, cos, cos,
        num_rows, qkv.stride(0), k_out.stride(0), k_out.stride(1),
        v_out.stride(0), v_out.stride(1), 0, 0.0 if k_norm is None else k_norm[1],
        FIRST_HEAD=num_q_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        ROWS=rows,
        IS_SCATTER=False,
        HAS_NORM=k_norm is not None,
        TYPE=_TYPES[qkv.dtype],
        num_warps=4,
    )  # fmt: skip


def rotary_scatter_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    base_addresses: Tensor,
    capacities: Tensor,
    rows: Tensor,
    layer: int,
    num_q_heads: int,
    num_kv_heads: int,
    k_norm: tuple[Tensor, float] | None,
) -> None:
    """See `op.rotary_scatter`."""
    num_rows, head_dim = qkv.shape[0], 2 * cos.shape[1]
    block = 16 if num_rows >= 16 else triton.next_power_of_2(num_rows)
    _rotary_write_kernel[(triton.cdiv(num_rows, block), num_kv_heads)](
        qkv, cos, sin, cos if k_norm is None else k_norm[0], qkv, qkv,
        base_addresses, capacities, rows,
        num_rows, qkv.stride(0), 0, 0, 0, 0, layer, 0.0 if k_norm is None else k_norm[1],
        FIRST_HEAD=num_q_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        ROWS=block,
        IS_SCATTER=True,
        HAS_NORM=k_norm is not None,
        TYPE=_TYPES[qkv.dtype],
        num_warps=4,
    )  # fmt: skip
