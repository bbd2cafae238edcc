"""Attention mass per key on CUDA: every program owns a block of keys and sums over all queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthros_kernels.triton_common import LOG2_E


@triton.jit
def _mass_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    out_ptr,
    num_rows,
    num_keys,
    k_head_stride,
    k_row_stride,
    factor,
    log2_e,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, DIM_BLOCK)
    is_column = column < HEAD_DIM
    is_key = keys < num_keys
    mass = tl.zeros([BLOCK_N], tl.float32)
    for head in range(KV_HEADS):
        k_at = k_ptr + head * k_head_stride + keys[:, None].to(tl.int64) * k_row_stride
        k = tl.load(k_at + column[None, :], mask=is_key[:, None] & is_column[None, :], other=0.0)
        for first in range(0, num_rows, BLOCK_M):
            rows = first + tl.arange(0, BLOCK_M)
            is_row = rows < num_rows
            q_at = q_ptr + (head * num_rows + rows)[:, None] * HEAD_DIM + column[None, :]
            q = tl.load(q_at, mask=is_row[:, None] & is_column[None, :], other=0.0)
            lse = tl.load(lse_ptr + head * num_rows + rows, mask=is_row, other=float("inf"))
            scores = tl.dot(q, tl.trans(k)) * factor - (lse * log2_e)[:, None]
            mass += tl.sum(tl.exp2(scores), 0)
    tl.store(out_ptr + keys, mass, mask=is_key)


def attention_mass_triton(q: Tensor, k: Tensor, lse: Tensor, *, scale: float) -> Tensor:
    """See `op.attention_mass`."""
    num_kv_heads, num_rows, head_dim = q.shape
    num_keys = k.shape[1]
    out = torch.empty(num_keys, dtype=torch.float32, device=q.device)
    _mass_kernel[(triton.cdiv(num_keys, 64),)](
        q.contiguous(), k, lse.contiguous(), out, num_rows, num_keys,
        k.stride(0), k.stride(1), scale * LOG2_E, LOG2_E,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_BLOCK=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=16 if num_rows <= 16 else 64,
        BLOCK_N=64,
        num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return out
