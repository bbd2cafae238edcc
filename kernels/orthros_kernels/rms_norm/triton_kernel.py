"""The norm on CUDA: one pass over memory, several short rows per program."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    num_rows,
    x_stride,
    residual_stride,
    width,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    is_there = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=is_there, other=0.0)
    place = rows[:, None] * width + columns[None, :]
    if HAS_RESIDUAL:
        residual_at = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
        residual = tl.load(residual_at, mask=is_there, other=0.0)
        # Rounded before the norm, as the plain sum is.
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + place, x, mask=is_there)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    normed = wide * scale[:, None] * weight[None, :]
    tl.store(normed_ptr + place, normed.to(normed_ptr.dtype.element_ty), mask=is_there)


def rms_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, *, eps: float, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `op.add_rms_norm`; x [R, M]. Without a residual the second tensor is x itself."""
    num_rows, width = x.shape
    padded = triton.next_power_of_2(width)
    if rows is None:
        # About 4096 numbers a program keep every load in flight, and one row the rest idle-free.
        rows = max(1, min(4096 // padded, triton.next_power_of_2(triton.cdiv(num_rows, 528))))
    normed = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    total = torch.empty_like(normed) if residual is not None else x
    other = x if residual is None else residual
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, other, weight, normed, total, num_rows, x.stride(0), other.stride(0), width, eps,
        ROWS=rows,
        WIDTH=padded,
        HAS_RESIDUAL=residual is not None,
        num_warps=4 if rows * padded <= 4096 else 8,
    )  # fmt: skip
    return normed, total
