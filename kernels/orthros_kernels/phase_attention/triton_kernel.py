"""Prefill-mode attention on CUDA: one program per query block and a few heads of one group.

Queries come as the projection wrote them and are rotated while they are loaded, so that no rotated
copy of them passes through memory. The heads of a program share each block of keys and values that
it loads: the second-level cache would else be the limit. Key blocks that every row of the query
block sees run without a mask; only the diagonal, the neighbourhood of the sinks and the carried
context pay for one.
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
    """Block shapes and launch parameters; every entry of `CONFIGS` is checked on the GPU.

    `shared_heads` query heads of a group share each block of keys and values that is loaded.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    shared_heads: int = 1


CONFIGS = (
    PhaseConfig(64, 64, 4, 2, 3),
    PhaseConfig(64, 64, 4, 3, 3),
    PhaseConfig(64, 32, 4, 3, 2),
    PhaseConfig(64, 32, 4, 4, 2),
    PhaseConfig(64, 64, 4, 3),
    PhaseConfig(64, 32, 4, 3),
    PhaseConfig(128, 64, 4, 3),
)


def default_config(head_dim: int, tile: int, group: int) -> PhaseConfig:
    """The configuration that was fastest on Hopper for this head and group size."""
    if tile < 64:
        return PhaseConfig(tile, tile, 4, 2)
    if head_dim <= 64:
        return PhaseConfig(64, 64, 4, 2, 3) if group % 3 == 0 else PhaseConfig(64, 64, 4, 3)
    return PhaseConfig(64, 32, 4, 3, 2 if group % 2 == 0 else 1)


@triton.jit
def _attend(
    states,
    queries,
    k,
    v,
    first_seen_at,
    positions,
    SHARED: tl.constexpr,
    MASKED: tl.constexpr,
):
    # One step of the online softmax of several heads over a block of their keys and values; a
    # query sees a key from the position on that first_seen_at says.
    updated = ()
    for each in tl.static_range(SHARED):
        acc, highest, total = states[each]
        scores = tl.dot(queries[each], tl.trans(k))
        if MASKED:
            is_seen = first_seen_at[None, :] <= positions[:, None]
            scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shift = new_highest
        if MASKED:
            # A row that has seen no key yet has no finite maximum to subtract.
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])
        updated = updated + ((acc, new_highest, total),)
    return updated


@triton.jit
def _load_block(
    k_ptr,
    v_ptr,
    k_row_stride,
    v_row_stride,
    row,
    num_rows,
    first_position,
    columns,
    is_column,
    NUM_SINKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr,
):
    # Keys and values of a block that may pass the end, and from where on each key is seen: sinks
    # are read elsewhere.
    rows = row + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    if PADDED:
        is_there = is_row[:, None] & is_column[None, :]
    else:
        is_there = is_row[:, None] & (columns[None, :] >= 0)
    offsets = rows[:, None].to(tl.int64)
    k = tl.load(k_ptr + offsets * k_row_stride + columns[None, :], mask=is_there, other=0.0)
    v = tl.load(v_ptr + offsets * v_row_stride + columns[None, :], mask=is_there, other=0.0)
    keys = first_position + rows
    return k, v, tl.where(is_row & (keys >= NUM_SINKS), keys, 2147483647)


@triton.jit
def _attend_edge(
    states,
    queries,
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
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr,
):
    # Rows [begin, end), which stand for positions first_position + row.
    for row in range(begin, end, BLOCK_N):
        k, v, first_seen_at = _load_block(
            k_ptr, v_ptr, k_row_stride, v_row_stride, row, num_rows, first_position,
            columns, is_column, NUM_SINKS, BLOCK_N, PADDED,
        )  # fmt: skip
        states = _attend(states, queries, k, v, first_seen_at, positions, SHARED, True)
    return states


@triton.jit
def _load_sinks(
    ptr,
    row_stride,
    kept_ptr,
    kept_row_stride,
    num_own,
    num_kept,
    columns,
    is_column,
    SINK_BLOCK: tl.constexpr,
):
    # A document's own first rows, or those that the carry kept.
    sink = tl.arange(0, SINK_BLOCK)
    is_own = (sink < num_own)[:, None] & is_column[None, :]
    is_kept = (sink < num_kept)[:, None] & is_column[None, :]
    own = tl.load(ptr + sink[:, None] * row_stride + columns[None, :], mask=is_own, other=0.0)
    kept_at = kept_ptr + sink[:, None] * kept_row_stride + columns[None, :]
    return own + tl.load(kept_at, mask=is_kept, other=0.0)


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
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    PADDED: tl.constexpr = HALF_BLOCK != HALF
    # Heads vary fastest: programs that run together share keys and values in the cache.
    first_head = tl.program_id(0) % (HEADS // SHARED) * SHARED
    block = tl.program_id(0) // (HEADS // SHARED)
    kv_head = first_head // GROUP
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
    k_ptr += kv_head.to(tl.int64) * k_head_stride + sequence_begin.to(tl.int64) * k_row_stride
    v_ptr += kv_head.to(tl.int64) * v_head_stride + sequence_begin.to(tl.int64) * v_row_stride
    DTYPE: tl.constexpr = k_ptr.dtype.element_ty

    # The diagonal comes first: its loads are under way while the queries are rotated.
    DIAGONAL: tl.constexpr = BLOCK_M // BLOCK_N
    diagonal = ()
    for each in tl.static_range(DIAGONAL):
        diagonal = diagonal + (
            _load_block(
                k_ptr, v_ptr, k_row_stride, v_row_stride, first_row + each * BLOCK_N, num_tokens,
                start, columns, is_column, NUM_SINKS, BLOCK_N, PADDED,
            ),
        )  # fmt: skip
    if NUM_SINKS > 0:
        # The rotation for sinks stands still once the window has left them behind.
        SETTLED: tl.constexpr = WINDOW + TILE + NUM_SINKS - 1
        sink = tl.arange(0, SINK_BLOCK)
        num_own = tl.where(start == 0, tl.minimum(num_tokens, NUM_SINKS), 0)
        num_kept = tl.where(start == 0, 0, NUM_SINKS)
        kept_at = sequence * sinks_sequence_stride + kv_head * sinks_head_stride
        k_sink = _load_sinks(
            k_ptr, k_row_stride, k_sinks_ptr + kept_at, sinks_row_stride, num_own, num_kept,
            columns, is_column, SINK_BLOCK,
        )  # fmt: skip
        v_sink = _load_sinks(
            v_ptr, v_row_stride, v_sinks_ptr + kept_at, sinks_row_stride, num_own, num_kept,
            columns, is_column, SINK_BLOCK,
        )  # fmt: skip
        clamped = tl.minimum(positions, SETTLED)
        sink_angle = clamped[:, None] * HALF + half[None, :]
        sink_cos = tl.load(sink_cos_ptr + sink_angle, mask=is_half, other=0.0)
        sink_sin = tl.load(sink_sin_ptr + sink_angle, mask=is_half, other=0.0)
        is_seen = (sink < NUM_SINKS)[None, :] & (sink[None, :] <= positions[:, None])
    angle = token_rows[:, None] * HALF + half[None, :]
    cos = tl.load(cos_ptr + angle, mask=is_half, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=is_half, other=0.0)
    q_at = q_ptr + token_rows[:, None] * q_row_stride + first_head * q_head_stride + half[None, :]
    queries = ()
    states = ()
    for each in tl.static_range(SHARED):
        first = tl.load(q_at + each * q_head_stride, mask=is_half, other=0.0).to(tl.float32)
        second = tl.load(q_at + each * q_head_stride + HALF, mask=is_half, other=0.0)
        second = second.to(tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, 2 * HALF_BLOCK], tl.float32)
        if NUM_SINKS > 0:
            q_sink = rotated_queries(first, second, sink_cos, sink_sin, factor, DTYPE)
            scores = tl.where(is_seen, tl.dot(q_sink, tl.trans(k_sink)), float("-inf"))
            highest = tl.max(scores, 1)
            weights = tl.exp2(scores - highest[:, None])
            total = tl.sum(weights, 1)
            acc = tl.dot(weights.to(v_sink.dtype), v_sink, acc)
        queries = queries + (rotated_queries(first, second, cos, sin, factor, DTYPE),)
        states = states + ((acc, highest, total),)

    for each in tl.static_range(DIAGONAL):
        k, v, first_seen_at = diagonal[each]
        states = _attend(states, queries, k, v, first_seen_at, positions, SHARED, True)
    window_begin = tl.maximum((start + first_row) // TILE * TILE - WINDOW, 0)
    if (window_begin >= start) & (window_begin > 0):
        # Every query sees all of these keys, and no sink is among them.
        for row in range(window_begin - start, first_row, BLOCK_N):
            offsets = (row + tl.arange(0, BLOCK_N))[:, None].to(tl.int64)
            k_at = k_ptr + offsets * k_row_stride + columns[None, :]
            v_at = v_ptr + offsets * v_row_stride + columns[None, :]
            if PADDED:
                k = tl.load(k_at, mask=is_column[None, :], other=0.0)
                v = tl.load(v_at, mask=is_column[None, :], other=0.0)
            else:
                k = tl.load(k_at)
                v = tl.load(v_at)
            states = _attend(states, queries, k, v, rows, positions, SHARED, False)
    else:
        if window_begin < start:
            # Rows of the carried context are positions [start - context_tokens, start).
            k_context_ptr += kv_head.to(tl.int64) * k_context_head_stride
            k_context_ptr += context_begin.to(tl.int64) * k_context_row_stride
            v_context_ptr += kv_head.to(tl.int64) * v_context_head_stride
            v_context_ptr += context_begin.to(tl.int64) * v_context_row_stride
            context_first = start - context_tokens
            states = _attend_edge(
                states, queries, k_context_ptr, v_context_ptr,
                k_context_row_stride, v_context_row_stride,
                window_begin - context_first, context_tokens, context_tokens, context_first,
                positions, columns, is_column, NUM_SINKS, SHARED, BLOCK_N, PADDED,
            )  # fmt: skip
        states = _attend_edge(
            states, queries, k_ptr, v_ptr, k_row_stride, v_row_stride,
            tl.maximum(window_begin - start, 0), first_row, num_tokens, start,
            positions, columns, is_column, NUM_SINKS, SHARED, BLOCK_N, PADDED,
        )  # fmt: skip

    is_out = is_row[:, None] & is_column[None, :]
    out_at = out_ptr + (token_rows[:, None] * HEADS + first_head) * HEAD_DIM + columns[None, :]
    for each in tl.static_range(SHARED):
        acc, highest, total = states[each]
        out = acc * (1.0 / total)[:, None]
        tl.store(out_at + each * HEAD_DIM, out.to(out_ptr.dtype.element_ty), mask=is_out)


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
    group = num_q_heads // num_kv_heads
    chosen = config or default_config(head_dim, steps.tile, group)
    if out is None:
        out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    num_blocks = steps.tiles.shape[0] * (steps.tile // chosen.block_m)
    # Without a carry nothing is read through these.
    k_context, v_context = (k, v) if carry is None else (carry.k_context, carry.v_context)
    k_sinks, v_sinks = (k[None], v[None]) if carry is None else (carry.k_sinks, carry.v_sinks)
    shared = chosen.shared_heads if group % chosen.shared_heads == 0 else 1
    _phase_attention_kernel[(num_blocks * num_q_heads // shared,)](
        q, k, v, k_context, v_context, k_sinks, v_sinks,
        cos_sin[0], cos_sin[1], sink_cos_sin[0], sink_cos_sin[1],
        steps.tiles, steps.sequences, out,
        q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_context.stride(0), k_context.stride(1), v_context.stride(0), v_context.stride(1),
        k_sinks.stride(0), k_sinks.stride(1), k_sinks.stride(2),
        scale * LOG2_E,
        GROUP=group,
        HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=max(8, triton.next_power_of_2(head_dim // 2)),
        WINDOW=steps.window,
        TILE=steps.tile,
        NUM_SINKS=num_sinks,
        SINK_BLOCK=max(16, triton.next_power_of_2(num_sinks)),
        SHARED=shared,
        BLOCK_M=chosen.block_m,
        BLOCK_N=min(chosen.block_n, chosen.block_m),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )  # fmt: skip
    return out
