"""Prefill-mode attention on CUDA: one program per query block and query head.

Queries come as the projection wrote them and are rotated while they are loaded, so that no rotated
copy of them passes through memory. Key blocks that every row of the query block sees run without a
mask; only the diagonal, the neighbourhood of the sinks and the carried context pay for one.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthros_kernels.phase_attention.packed import PackedCarry, PackedSteps
from orthros_kernels.triton_common import LOG2_E, head_columns, rotated_queries


@dataclass(frozen=True, slots=True)
class PhaseConfig:
    """Block shapes and launch parameters; every entry of `CONFIGS` is checked on the GPU."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


CONFIGS = (
    PhaseConfig(128, 64, 4, 3),
    PhaseConfig(128, 64, 8, 3),
    PhaseConfig(128, 128, 8, 2),
    PhaseConfig(128, 128, 4, 2),
    PhaseConfig(64, 64, 4, 3),
    PhaseConfig(64, 128, 4, 2),
    PhaseConfig(64, 32, 4, 4),
    PhaseConfig(128, 32, 4, 4),
)


def default_config(head_dim: int, tile: int) -> PhaseConfig:
    """The configuration that was fastest on Hopper for this head size."""
    if tile < 64:
        return PhaseConfig(tile, tile, 4, 2)
    if head_dim <= 64:
        return PhaseConfig(min(128, tile), 64, 4, 3)
    return PhaseConfig(min(128, tile), 64, 8, 3)


@triton.jit
def _attend_blocks(
    acc,
    highest,
    total,
    q,
    k_ptr,
    v_ptr,
    k_row_stride,
    v_row_stride,
    begin,
    end,
    num_rows,
    first_position,
    positions,
    columns,
    is_column,
    NUM_SINKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PADDED: tl.constexpr,
):
    # Online softmax over rows [begin, end) of k and v, which stand for positions first_position +
    # row. MASKED: the block may hold sinks, rows after a query, or rows past num_rows.
    for row in range(begin, end, BLOCK_N):
        rows = row + tl.arange(0, BLOCK_N)
        k_at = k_ptr + rows[:, None].to(tl.int64) * k_row_stride + columns[None, :]
        v_at = v_ptr + rows[:, None].to(tl.int64) * v_row_stride + columns[None, :]
        if MASKED:
            is_row = rows < num_rows
            if PADDED:
                is_there = is_row[:, None] & is_column[None, :]
            else:
                is_there = is_row[:, None] & (columns[None, :] >= 0)
            k = tl.load(k_at, mask=is_there, other=0.0)
            v = tl.load(v_at, mask=is_there, other=0.0)
        elif PADDED:
            k = tl.load(k_at, mask=is_column[None, :], other=0.0)
            v = tl.load(v_at, mask=is_column[None, :], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            keys = first_position + rows
            is_seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] >= NUM_SINKS)
            is_seen = is_seen & is_row[None, :]
            scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        if MASKED:
            # A row that has seen no key yet has no finite maximum to subtract.
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        else:
            shift = new_highest
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc)
        highest = new_highest
    return acc, highest, total


@triton.jit
def _phase_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_context_ptr,
    v_context_ptr,
    k_sinks_ptr,
    v_sinks_ptr,
    cos_ptr,
    sin_ptr,
    sink_cos_ptr,
    sink_sin_ptr,
    tiles_ptr,
    sequences_ptr,
    out_ptr,
    q_row_stride,
    q_head_stride,
    k_head_stride,
    k_row_stride,
    v_head_stride,
    v_row_stride,
    k_context_head_stride,
    k_context_row_stride,
    v_context_head_stride,
    v_context_row_stride,
    sinks_sequence_stride,
    sinks_head_stride,
    sinks_row_stride,
    factor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    SINK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    PADDED: tl.constexpr = HALF_BLOCK != HALF
    # Heads vary fastest: programs that run together share keys and values in the cache.
    head = tl.program_id(0) % HEADS
    block = tl.program_id(0) // HEADS
    kv_head = head // GROUP
    BLOCKS: tl.constexpr = TILE // BLOCK_M
    sequence = tl.load(tiles_ptr + 2 * (block // BLOCKS))
    first_row = tl.load(tiles_ptr + 2 * (block // BLOCKS) + 1) + block % BLOCKS * BLOCK_M
    sequence_begin = tl.load(sequences_ptr + 4 * sequence)
    num_tokens = tl.load(sequences_ptr + 4 * sequence + 1)
    start = tl.load(sequences_ptr + 4 * sequence + 2)
    context_begin = tl.load(sequences_ptr + 4 * sequence + 3)
    context_tokens = tl.minimum(start, WINDOW)
    if first_row >= num_tokens:
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < num_tokens
    positions = start + rows
    columns, is_column = head_columns(HALF_BLOCK, HALF)
    half = tl.arange(0, HALF_BLOCK)
    is_half = is_row[:, None] & (half < HALF)[None, :]
    token_rows = (sequence_begin + rows).to(tl.int64)
    q_at = q_ptr + token_rows[:, None] * q_row_stride + head * q_head_stride + half[None, :]
    q_first = tl.load(q_at, mask=is_half, other=0.0).to(tl.float32)
    q_second = tl.load(q_at + HALF, mask=is_half, other=0.0).to(tl.float32)

    k_ptr += kv_head.to(tl.int64) * k_head_stride + sequence_begin.to(tl.int64) * k_row_stride
    v_ptr += kv_head.to(tl.int64) * v_head_stride + sequence_begin.to(tl.int64) * v_row_stride
    DTYPE: tl.constexpr = k_ptr.dtype.element_ty

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 2 * HALF_BLOCK], tl.float32)
    if NUM_SINKS > 0:
        # The rotation for sinks stands still once the window has left them behind.
        clamped = tl.minimum(positions, WINDOW + TILE + NUM_SINKS - 1)
        sink_angle = clamped[:, None] * HALF + half[None, :]
        cos = tl.load(sink_cos_ptr + sink_angle, mask=is_half, other=0.0)
        sin = tl.load(sink_sin_ptr + sink_angle, mask=is_half, other=0.0)
        q = rotated_queries(q_first, q_second, cos, sin, factor, DTYPE)
        sink = tl.arange(0, SINK_BLOCK)
        num_own = tl.where(start == 0, tl.minimum(num_tokens, NUM_SINKS), 0)
        num_kept = tl.where(start == 0, 0, NUM_SINKS)
        sink_at = sequence * sinks_sequence_stride + kv_head * sinks_head_stride
        sink_at += sink[:, None] * sinks_row_stride + columns[None, :]
        is_own = (sink < num_own)[:, None] & is_column[None, :]
        is_kept = (sink < num_kept)[:, None] & is_column[None, :]
        k_own = tl.load(
            k_ptr + sink[:, None] * k_row_stride + columns[None, :], mask=is_own, other=0.0
        )
        v_own = tl.load(
            v_ptr + sink[:, None] * v_row_stride + columns[None, :], mask=is_own, other=0.0
        )
        k_sink = k_own + tl.load(k_sinks_ptr + sink_at, mask=is_kept, other=0.0)
        v_sink = v_own + tl.load(v_sinks_ptr + sink_at, mask=is_kept, other=0.0)
        scores = tl.dot(q, tl.trans(k_sink))
        is_seen = (sink < NUM_SINKS)[None, :] & (sink[None, :] <= positions[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        highest = tl.max(scores, 1)
        weights = tl.exp2(scores - highest[:, None])
        total = tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_sink.dtype), v_sink, acc)

    angle = token_rows[:, None] * HALF + half[None, :]
    cos = tl.load(cos_ptr + angle, mask=is_half, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=is_half, other=0.0)
    q = rotated_queries(q_first, q_second, cos, sin, factor, DTYPE)

    window_begin = tl.maximum((start + first_row) // TILE * TILE - WINDOW, 0)
    # Rows of the context are positions [start - context_tokens, start).
    context_first = start - context_tokens
    if window_begin < start:
        k_context_ptr += kv_head.to(tl.int64) * k_context_head_stride
        k_context_ptr += context_begin.to(tl.int64) * k_context_row_stride
        v_context_ptr += kv_head.to(tl.int64) * v_context_head_stride
        v_context_ptr += context_begin.to(tl.int64) * v_context_row_stride
        acc, highest, total = _attend_blocks(
            acc, highest, total, q, k_context_ptr, v_context_ptr,
            k_context_row_stride, v_context_row_stride,
            window_begin - context_first, context_tokens, context_tokens, context_first,
            positions, columns, is_column, NUM_SINKS, BLOCK_N, True, PADDED,
        )  # fmt: skip
    own_begin = tl.maximum(window_begin - start, 0)
    # Beside the sinks, in the first tiles of a document, every block is masked.
    diagonal = first_row // BLOCK_N * BLOCK_N
    masked_end = tl.where(window_begin + start == 0, diagonal, own_begin)
    if masked_end > own_begin:
        acc, highest, total = _attend_blocks(
            acc, highest, total, q, k_ptr, v_ptr, k_row_stride, v_row_stride,
            own_begin, masked_end, num_tokens, start,
            positions, columns, is_column, NUM_SINKS, BLOCK_N, True, PADDED,
        )  # fmt: skip
    acc, highest, total = _attend_blocks(
        acc, highest, total, q, k_ptr, v_ptr, k_row_stride, v_row_stride,
        masked_end, diagonal, num_tokens, start,
        positions, columns, is_column, NUM_SINKS, BLOCK_N, False, PADDED,
    )  # fmt: skip
    acc, highest, total = _attend_blocks(
        acc, highest, total, q, k_ptr, v_ptr, k_row_stride, v_row_stride,
        diagonal, tl.minimum(first_row + BLOCK_M, num_tokens), num_tokens, start,
        positions, columns, is_column, NUM_SINKS, BLOCK_N, True, PADDED,
    )  # fmt: skip

    out = acc / total[:, None]
    out_at = out_ptr + (token_rows[:, None] * HEADS + head) * HEAD_DIM + columns[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def phase_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: PackedSteps,
    *,
    carry: PackedCarry | None,
    cos_sin: tuple[Tensor, Tensor],
    sink_cos_sin: tuple[Tensor, Tensor],
    num_sinks: int,
    scale: float,
    out: Tensor | None = None,
    config: PhaseConfig | None = None,
) -> Tensor:
    """See `op.packed_phase_attention`; arguments are taken as checked there."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[0]
    chosen = config or default_config(head_dim, steps.tile)
    if out is None:
        out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    num_blocks = steps.tiles.shape[0] * (steps.tile // chosen.block_m)
    # Without a carry nothing is read through these.
    k_context, v_context = (k, v) if carry is None else (carry.k_context, carry.v_context)
    k_sinks, v_sinks = (k[None], v[None]) if carry is None else (carry.k_sinks, carry.v_sinks)
    _phase_attention_kernel[(num_blocks * num_q_heads,)](
        q, k, v, k_context, v_context, k_sinks, v_sinks,
        cos_sin[0], cos_sin[1], sink_cos_sin[0], sink_cos_sin[1],
        steps.tiles, steps.sequences, out,
        q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_context.stride(0), k_context.stride(1), v_context.stride(0), v_context.stride(1),
        k_sinks.stride(0), k_sinks.stride(1), k_sinks.stride(2),
        scale * LOG2_E,
        GROUP=num_q_heads // num_kv_heads,
        HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=max(8, triton.next_power_of_2(head_dim // 2)),
        WINDOW=steps.window,
        TILE=steps.tile,
        NUM_SINKS=num_sinks,
        SINK_BLOCK=max(16, triton.next_power_of_2(num_sinks)),
        BLOCK_M=chosen.block_m,
        BLOCK_N=min(chosen.block_n, steps.tile),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )  # fmt: skip
    return out
