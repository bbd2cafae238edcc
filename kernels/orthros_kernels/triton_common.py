"""What several Triton kernels share: the columns of a head, and queries rotated on load."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def head_columns(HALF_BLOCK: tl.constexpr, HALF: tl.constexpr):
    """Columns of a head laid out over 2 * HALF_BLOCK lanes, and which lanes hold one.

    Each half is padded by itself, so that rotation pairs stay HALF_BLOCK lanes apart for head
    sizes that are no power of two.
    """
    lane = tl.arange(0, 2 * HALF_BLOCK)
    if HALF_BLOCK == HALF:
        column = lane
        is_column = lane >= 0
    else:
        in_half = lane % HALF_BLOCK
        # Half a head is a multiple of eight columns, so runs of eight stay whole.
        column = tl.max_contiguous(tl.multiple_of((lane // HALF_BLOCK) * HALF + in_half, 8), 8)
        is_column = in_half < HALF
    return column, is_column


@triton.jit
def rotated_queries(first, second, cos, sin, factor, DTYPE: tl.constexpr):
    """[M, HALF_BLOCK] fp32 halves -> [M, 2 * HALF_BLOCK]: rotated and scaled, rounded once."""
    low = (first * cos - second * sin) * factor
    high = (second * cos + first * sin) * factor
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(both, (low.shape[0], 2 * low.shape[1])).to(DTYPE)
