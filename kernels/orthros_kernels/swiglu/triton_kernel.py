"""SwiGLU on CUDA: one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, row_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < width
    at = gate_up_ptr + row * row_stride + columns
    gate = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=is_there, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=is_there)


def swiglu_triton(gate_up: Tensor, *, block: int | None = None) -> Tensor:
    """See `op.swiglu`; gate_up [R, 2 I]."""
    num_rows, both = gate_up.shape
    width = both // 2
    block = block or min(2048, triton.next_power_of_2(width))
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _swiglu_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up, out, gate_up.stride(0), width, BLOCK=block, num_warps=4
    )
    return out
