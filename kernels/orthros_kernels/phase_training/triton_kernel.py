"""Training attention with the phase mask on CUDA, forward and gradients, without atomics.

Document rows (sinks and a window, the same work for every tile) and decode-mode rows (a whole
document) have kernels of their own. The latter are split over runs of keys and merged, so that a
handful of question rows behind a long document fills the device. Log-sum-exps are kept in base 2;
rows of padding have +inf there, which gives them no weight wherever a gradient is formed.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthros_kernels.phase_training.layout import TILE, PhaseLayout
from orthros_kernels.triton_common import LOG2_E


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Query rows and keys of one block, and how it is launched."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Block shapes of the forward pass and of the two parts of the gradient."""

    forward: BlockConfig
    grad_q: BlockConfig
    grad_kv: BlockConfig


# What compiles without spilled registers at a head size of 64; every entry is checked on the GPU.
FORWARD_CONFIGS = (
    BlockConfig(128, 64, 4, 3),
    BlockConfig(128, 64, 8, 3),
    BlockConfig(64, 64, 4, 3),
    BlockConfig(128, 128, 8, 2),
)
GRAD_Q_CONFIGS = (
    BlockConfig(64, 64, 4, 3),
    BlockConfig(128, 64, 8, 3),
    BlockConfig(128, 64, 8, 2),
    BlockConfig(64, 128, 4, 2),
)
GRAD_KV_CONFIGS = (
    BlockConfig(64, 64, 4, 3),
    BlockConfig(64, 64, 4, 2),
    BlockConfig(32, 64, 4, 3),
    BlockConfig(64, 128, 8, 2),
    BlockConfig(64, 128, 8, 3),
    BlockConfig(32, 128, 8, 3),
    BlockConfig(64, 64, 8, 2),
)
_MERGE_ROWS = 32
_DELTA_ROWS = 64
_REDUCE_ROWS, _REDUCE_COLUMNS = 64, 64


def default_config(head_dim: int, dtype: torch.dtype) -> TrainingConfig:
    """The fastest on Hopper for a head size of 64; not measured for the larger ones."""
    if dtype == torch.float32:
        # The interpreter: few large blocks.
        whole = BlockConfig(TILE, TILE, 4, 1)
        return TrainingConfig(forward=whole, grad_q=whole, grad_kv=whole)
    if head_dim <= 64:
        return TrainingConfig(
            forward=BlockConfig(128, 64, 4, 3),
            grad_q=BlockConfig(64, 64, 4, 3),
            grad_kv=BlockConfig(64, 64, 4, 3),
        )
    return TrainingConfig(
        forward=BlockConfig(128, 64, 8, 3),
        grad_q=BlockConfig(64, 64, 4, 2),
        grad_kv=BlockConfig(64, 64, 8, 2),
    )


@triton.jit
def _load_rows(
    ptr,
    rows,
    row_stride,
    end,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    # [rows, HEAD_BLOCK]; zeros past the head's columns and, if BOUNDED, in rows from end on.
    columns = tl.arange(0, HEAD_BLOCK)
    at = ptr + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    if BOUNDED:
        if HEAD_BLOCK != HEAD_DIM:
            x = tl.load(at, mask=(rows < end)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
        else:
            x = tl.load(at, mask=(rows < end)[:, None], other=0.0)
    else:
        if HEAD_BLOCK != HEAD_DIM:
            x = tl.load(at, mask=(columns < HEAD_DIM)[None, :], other=0.0)
        else:
            x = tl.load(at)
    return x


@triton.jit
def _store_rows(
    ptr, x, rows, row_stride, end, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr
):  # fmt: skip
    columns = tl.arange(0, HEAD_BLOCK)
    at = ptr + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    is_there = (rows < end)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=is_there)


@triton.jit
def _attend_keys(
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
    first_key,
    last_key,
    factor,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    # Online softmax over keys [begin, end). MASKED: a row sees first_key .. last_key of them, and
    # the last block may reach past end.
    for key in range(begin, end, BLOCK_N):
        keys = key + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, keys, k_row_stride, end, HEAD_DIM, HEAD_BLOCK, MASKED)
        v = _load_rows(v_ptr, keys, v_row_stride, end, HEAD_DIM, HEAD_BLOCK, MASKED)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            is_seen = (keys[None, :] >= first_key[:, None]) & (keys[None, :] <= last_key[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        if MASKED:
            # A row that has seen no key yet has no finite maximum to subtract.
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        else:
            shift = new_highest
        weights = tl.exp2(scores * factor - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc)
        highest = new_highest
    return acc, highest, total


@triton.jit
def _document_forward_kernel(
    q_ptr,
    q_sink_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    document_tiles_ptr,
    q_row_stride,
    q_head_stride,
    q_sink_row_stride,
    q_sink_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_tokens,
    factor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    SINK_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Heads vary fastest: programs that run together share keys and values in the cache.
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    block = tl.program_id(0) // HEADS
    BLOCKS: tl.constexpr = TILE // BLOCK_M
    tile = tl.load(document_tiles_ptr + 3 * (block // BLOCKS))
    start = tl.load(document_tiles_ptr + 3 * (block // BLOCKS) + 1)
    document_end = tl.load(document_tiles_ptr + 3 * (block // BLOCKS) + 2)
    first_row = tile * TILE + block % BLOCKS * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)

    q_ptr += head * q_head_stride
    k_ptr += (head // GROUP) * k_head_stride
    v_ptr += (head // GROUP) * v_head_stride
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    if NUM_SINKS > 0:
        q_sink_ptr += head * q_sink_head_stride
        q_sink = _load_rows(
            q_sink_ptr, rows, q_sink_row_stride, num_tokens, HEAD_DIM, HEAD_BLOCK, True
        )
        sinks = start + tl.arange(0, SINK_BLOCK)
        sinks_end = tl.minimum(start + NUM_SINKS, document_end)
        k_sink = _load_rows(k_ptr, sinks, k_row_stride, sinks_end, HEAD_DIM, HEAD_BLOCK, True)
        v_sink = _load_rows(v_ptr, sinks, v_row_stride, sinks_end, HEAD_DIM, HEAD_BLOCK, True)
        scores = tl.dot(q_sink, tl.trans(k_sink))
        is_seen = (sinks < sinks_end)[None, :] & (sinks[None, :] <= rows[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        # Every row sees the first sink, so the maximum is finite from here on.
        highest = tl.max(scores, 1) * factor
        weights = tl.exp2(scores * factor - highest[:, None])
        total = tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_sink.dtype), v_sink, acc)

    q = _load_rows(q_ptr, rows, q_row_stride, num_tokens, HEAD_DIM, HEAD_BLOCK, True)
    window_begin = tl.maximum(start, tile * TILE - WINDOW)
    plain_end = tl.minimum(first_row, document_end) // BLOCK_N * BLOCK_N
    if NUM_SINKS > 0:
        # Beside the sinks, in the first tiles of a document, every block is masked.
        plain_end = tl.where(window_begin == start, window_begin, plain_end)
    first_key = tl.full([BLOCK_M], NUM_SINKS, tl.int32) + start
    acc, highest, total = _attend_keys(
        acc, highest, total, q, k_ptr, v_ptr, k_row_stride, v_row_stride,
        window_begin, plain_end, first_key, rows, factor,
        HEAD_DIM, HEAD_BLOCK, BLOCK_N, False,
    )  # fmt: skip
    acc, highest, total = _attend_keys(
        acc, highest, total, q, k_ptr, v_ptr, k_row_stride, v_row_stride,
        plain_end, tl.minimum(first_row + BLOCK_M, document_end), first_key, rows, factor,
        HEAD_DIM, HEAD_BLOCK, BLOCK_N, True,
    )  # fmt: skip

    # Rows of padding behind the document: zeros, whatever they have seen.
    is_token = (rows < document_end) & (total > 0.0)
    safe_total = tl.where(is_token, total, 1.0)
    out = tl.where(is_token[:, None], acc / safe_total[:, None], 0.0)
    lse = tl.where(is_token, highest + tl.log2(safe_total), float("inf"))
    out_ptr += head * HEAD_DIM
    _store_rows(out_ptr, out, rows, HEADS * HEAD_DIM, num_tokens, HEAD_DIM, HEAD_BLOCK)
    tl.store(lse_ptr + head * num_tokens + rows, lse, mask=rows < num_tokens)


@triton.jit
def _run_bounds(
    items_ptr,
    segment_begin_ptr,
    item,
    rows,
    BLOCK_N: tl.constexpr,
):
    # Keys [begin, end) of an item, unmasked up to plain_end, and what each row sees of them.
    is_own = tl.load(items_ptr + 4 * item + 1)
    begin = tl.load(items_ptr + 4 * item + 2)
    end = tl.load(items_ptr + 4 * item + 3)
    plain_end = tl.where(is_own == 1, begin, begin + (end - begin) // BLOCK_N * BLOCK_N)
    first_key = tl.where(is_own == 1, tl.load(segment_begin_ptr + rows), 0)
    last_key = tl.where(is_own == 1, tl.minimum(rows, end - 1), end - 1)
    return begin, plain_end, end, first_key, last_key


@triton.jit
def _item_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    part_lse_ptr,
    items_ptr,
    segment_begin_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_tokens,
    factor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Decode-mode rows of one tile over one run of keys: a normalized part and its log-sum-exp.
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    block = tl.program_id(0) // HEADS
    BLOCKS: tl.constexpr = TILE // BLOCK_M
    item = block // BLOCKS
    first_in_tile = block % BLOCKS * BLOCK_M
    in_tile = first_in_tile + tl.arange(0, BLOCK_M)
    rows = tl.load(items_ptr + 4 * item) * TILE + in_tile
    begin, plain_end, end, first_key, last_key = _run_bounds(
        items_ptr, segment_begin_ptr, item, rows, BLOCK_N
    )

    q = _load_rows(
        q_ptr + head * q_head_stride, rows, q_row_stride, num_tokens, HEAD_DIM, HEAD_BLOCK, True
    )
    k_ptr += (head // GROUP) * k_head_stride
    v_ptr += (head // GROUP) * v_head_stride
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    acc, highest, total = _attend_keys(
        acc, highest, total, q, k_ptr, v_ptr, k_row_stride, v_row_stride,
        begin, plain_end, first_key, last_key, factor,
        HEAD_DIM, HEAD_BLOCK, BLOCK_N, False,
    )  # fmt: skip
    acc, highest, total = _attend_keys(
        acc, highest, total, q, k_ptr, v_ptr, k_row_stride, v_row_stride,
        plain_end, end, first_key, last_key, factor,
        HEAD_DIM, HEAD_BLOCK, BLOCK_N, True,
    )  # fmt: skip

    safe_total = tl.where(total > 0.0, total, 1.0)
    lse = tl.where(total > 0.0, highest + tl.log2(safe_total), float("-inf"))
    part_row = (item.to(tl.int64) * HEADS + head) * TILE
    part_ptr += part_row * HEAD_DIM
    out = acc / safe_total[:, None]
    _store_rows(part_ptr, out, in_tile, HEAD_DIM, TILE, HEAD_DIM, HEAD_BLOCK)
    tl.store(part_lse_ptr + part_row + in_tile, lse)


@triton.jit
def _merge_forward_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    other_tiles_ptr,
    segment_begin_ptr,
    num_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    block = tl.program_id(0) // HEADS
    BLOCKS: tl.constexpr = TILE // BLOCK_M
    tile = tl.load(other_tiles_ptr + 3 * (block // BLOCKS))
    items_begin = tl.load(other_tiles_ptr + 3 * (block // BLOCKS) + 1)
    items_end = tl.load(other_tiles_ptr + 3 * (block // BLOCKS) + 2)
    in_tile = block % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tile * TILE + in_tile
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    for item in range(items_begin, items_end):
        part_row = (item * HEADS + head) * TILE
        part_lse = tl.load(part_lse_ptr + part_row + in_tile)
        part = _load_rows(
            part_ptr + part_row * HEAD_DIM, in_tile, HEAD_DIM, TILE, HEAD_DIM, HEAD_BLOCK, False
        )
        new_highest = tl.maximum(highest, part_lse)
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weight = tl.exp2(part_lse - shift)
        decay = tl.exp2(highest - shift)
        total = total * decay + weight
        acc = acc * decay[:, None] + part * weight[:, None]
        highest = new_highest
    is_token = (tl.load(segment_begin_ptr + rows) <= rows) & (total > 0.0)
    safe_total = tl.where(is_token, total, 1.0)
    out = tl.where(is_token[:, None], acc / safe_total[:, None], 0.0)
    lse = tl.where(is_token, highest + tl.log2(safe_total), float("inf"))
    out_ptr += head * HEAD_DIM
    _store_rows(out_ptr, out, rows, HEADS * HEAD_DIM, num_tokens, HEAD_DIM, HEAD_BLOCK)
    tl.store(lse_ptr + head * num_tokens + rows, lse, mask=rows < num_tokens)


@triton.jit
def _delta_kernel(
    out_ptr,
    grad_out_ptr,
    delta_ptr,
    num_tokens,
    num_rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # delta = rowsum(out * grad_out), [H, T], over the flat rows of two contiguous [T, H, D].
    flat = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    out = _load_rows(out_ptr, flat, HEAD_DIM, num_rows, HEAD_DIM, HEAD_BLOCK, True)
    grad_out = _load_rows(grad_out_ptr, flat, HEAD_DIM, num_rows, HEAD_DIM, HEAD_BLOCK, True)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    tl.store(delta_ptr + flat % HEADS * num_tokens + flat // HEADS, delta, mask=flat < num_rows)


@triton.jit
def _grad_q_keys(
    grad_q,
    q,
    grad_out,
    lse,
    delta,
    k_ptr,
    v_ptr,
    k_row_stride,
    v_row_stride,
    begin,
    end,
    first_key,
    last_key,
    factor,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    # Adds what keys [begin, end) give to the gradient of the queries, without the softmax scale.
    for key in range(begin, end, BLOCK_N):
        keys = key + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, keys, k_row_stride, end, HEAD_DIM, HEAD_BLOCK, MASKED)
        v = _load_rows(v_ptr, keys, v_row_stride, end, HEAD_DIM, HEAD_BLOCK, MASKED)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            is_seen = (keys[None, :] >= first_key[:, None]) & (keys[None, :] <= last_key[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        weights = tl.exp2(scores * factor - lse[:, None])
        grad_weights = tl.dot(grad_out, tl.trans(v))
        grad_scores = weights * (grad_weights - delta[:, None])
        grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q)
    return grad_q


@triton.jit
def _document_grad_q_kernel(
    q_ptr,
    q_sink_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_q_ptr,
    grad_q_sink_ptr,
    sinks_k_ptr,
    sinks_v_ptr,
    document_tiles_ptr,
    q_row_stride,
    q_head_stride,
    q_sink_row_stride,
    q_sink_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_tokens,
    factor,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    SINK_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Gradients of both queries, and this block's share of the sinks' gradients, fp32 [s, D] each.
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    block = tl.program_id(0) // HEADS
    BLOCKS: tl.constexpr = TILE // BLOCK_M
    tile = tl.load(document_tiles_ptr + 3 * (block // BLOCKS))
    start = tl.load(document_tiles_ptr + 3 * (block // BLOCKS) + 1)
    document_end = tl.load(document_tiles_ptr + 3 * (block // BLOCKS) + 2)
    first_row = tile * TILE + block % BLOCKS * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < num_tokens
    OUT_STRIDE: tl.constexpr = HEADS * HEAD_DIM

    k_ptr += (head // GROUP) * k_head_stride
    v_ptr += (head // GROUP) * v_head_stride
    grad_out = _load_rows(
        grad_out_ptr + head * HEAD_DIM, rows, OUT_STRIDE, num_tokens, HEAD_DIM, HEAD_BLOCK, True
    )
    lse = tl.load(lse_ptr + head * num_tokens + rows, mask=is_row, other=float("inf"))
    delta = tl.load(delta_ptr + head * num_tokens + rows, mask=is_row, other=0.0)
    if NUM_SINKS > 0:
        q_sink = _load_rows(
            q_sink_ptr + head * q_sink_head_stride, rows, q_sink_row_stride, num_tokens,
            HEAD_DIM, HEAD_BLOCK, True,
        )  # fmt: skip
        sink = tl.arange(0, SINK_BLOCK)
        sinks = start + sink
        sinks_end = tl.minimum(start + NUM_SINKS, document_end)
        k_sink = _load_rows(k_ptr, sinks, k_row_stride, sinks_end, HEAD_DIM, HEAD_BLOCK, True)
        v_sink = _load_rows(v_ptr, sinks, v_row_stride, sinks_end, HEAD_DIM, HEAD_BLOCK, True)
        is_sink = sinks < sinks_end
        scores = tl.dot(q_sink, tl.trans(k_sink))
        is_seen = is_sink[None, :] & (sinks[None, :] <= rows[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        weights = tl.exp2(scores * factor - lse[:, None])
        grad_scores = weights * (tl.dot(grad_out, tl.trans(v_sink)) - delta[:, None])
        grad_q_sink = tl.dot(grad_scores.to(k_sink.dtype), k_sink) * scale
        _store_rows(
            grad_q_sink_ptr + head * HEAD_DIM, grad_q_sink, rows, OUT_STRIDE, num_tokens,
            HEAD_DIM, HEAD_BLOCK,
        )  # fmt: skip
        # The same scores with keys as rows, computed anew: a transposed product is no safe operand.
        scores_t = tl.dot(k_sink, tl.trans(q_sink))
        is_seen_t = is_sink[:, None] & (sinks[:, None] <= rows[None, :])
        scores_t = tl.where(is_seen_t, scores_t, float("-inf"))
        weights_t = tl.exp2(scores_t * factor - lse[None, :])
        grad_t = weights_t * (tl.dot(v_sink, tl.trans(grad_out)) - delta[None, :])
        sinks_k = tl.dot(grad_t.to(q_sink.dtype), q_sink)
        sinks_v = tl.dot(weights_t.to(grad_out.dtype), grad_out)
        sinks_at = (block * HEADS + head) * (NUM_SINKS * HEAD_DIM)
        _store_rows(
            sinks_k_ptr + sinks_at, sinks_k, sink, HEAD_DIM, NUM_SINKS, HEAD_DIM, HEAD_BLOCK
        )
        _store_rows(
            sinks_v_ptr + sinks_at, sinks_v, sink, HEAD_DIM, NUM_SINKS, HEAD_DIM, HEAD_BLOCK
        )

    q = _load_rows(
        q_ptr + head * q_head_stride, rows, q_row_stride, num_tokens, HEAD_DIM, HEAD_BLOCK, True
    )
    window_begin = tl.maximum(start, tile * TILE - WINDOW)
    plain_end = tl.minimum(first_row, document_end) // BLOCK_N * BLOCK_N
    if NUM_SINKS > 0:
        plain_end = tl.where(window_begin == start, window_begin, plain_end)
    first_key = tl.full([BLOCK_M], NUM_SINKS, tl.int32) + start
    grad_q = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    grad_q = _grad_q_keys(
        grad_q, q, grad_out, lse, delta, k_ptr, v_ptr, k_row_stride, v_row_stride,
        window_begin, plain_end, first_key, rows, factor,
        HEAD_DIM, HEAD_BLOCK, BLOCK_N, False,
    )  # fmt: skip
    grad_q = _grad_q_keys(
        grad_q, q, grad_out, lse, delta, k_ptr, v_ptr, k_row_stride, v_row_stride,
        plain_end, tl.minimum(first_row + BLOCK_M, document_end), first_key, rows, factor,
        HEAD_DIM, HEAD_BLOCK, BLOCK_N, True,
    )  # fmt: skip
    _store_rows(
        grad_q_ptr + head * HEAD_DIM, grad_q * scale, rows, OUT_STRIDE, num_tokens,
        HEAD_DIM, HEAD_BLOCK,
    )  # fmt: skip


@triton.jit
def _item_grad_q_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    part_ptr,
    items_ptr,
    segment_begin_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_tokens,
    factor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    block = tl.program_id(0) // HEADS
    BLOCKS: tl.constexpr = TILE // BLOCK_M
    item = block // BLOCKS
    in_tile = block % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.load(items_ptr + 4 * item) * TILE + in_tile
    is_row = rows < num_tokens
    begin, plain_end, end, first_key, last_key = _run_bounds(
        items_ptr, segment_begin_ptr, item, rows, BLOCK_N
    )
    q = _load_rows(
        q_ptr + head * q_head_stride, rows, q_row_stride, num_tokens, HEAD_DIM, HEAD_BLOCK, True
    )
    grad_out = _load_rows(
        grad_out_ptr + head * HEAD_DIM, rows, HEADS * HEAD_DIM, num_tokens,
        HEAD_DIM, HEAD_BLOCK, True,
    )  # fmt: skip
    lse = tl.load(lse_ptr + head * num_tokens + rows, mask=is_row, other=float("inf"))
    delta = tl.load(delta_ptr + head * num_tokens + rows, mask=is_row, other=0.0)
    k_ptr += (head // GROUP) * k_head_stride
    v_ptr += (head // GROUP) * v_head_stride
    grad_q = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    grad_q = _grad_q_keys(
        grad_q, q, grad_out, lse, delta, k_ptr, v_ptr, k_row_stride, v_row_stride,
        begin, plain_end, first_key, last_key, factor,
        HEAD_DIM, HEAD_BLOCK, BLOCK_N, False,
    )  # fmt: skip
    grad_q = _grad_q_keys(
        grad_q, q, grad_out, lse, delta, k_ptr, v_ptr, k_row_stride, v_row_stride,
        plain_end, end, first_key, last_key, factor,
        HEAD_DIM, HEAD_BLOCK, BLOCK_N, True,
    )  # fmt: skip
    part_ptr += (item.to(tl.int64) * HEADS + head) * (TILE * HEAD_DIM)
    _store_rows(part_ptr, grad_q, in_tile, HEAD_DIM, TILE, HEAD_DIM, HEAD_BLOCK)


@triton.jit
def _merge_grad_q_kernel(
    part_ptr,
    grad_q_ptr,
    grad_q_sink_ptr,
    other_tiles_ptr,
    num_tokens,
    scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    block = tl.program_id(0) // HEADS
    BLOCKS: tl.constexpr = TILE // BLOCK_M
    tile = tl.load(other_tiles_ptr + 3 * (block // BLOCKS))
    items_begin = tl.load(other_tiles_ptr + 3 * (block // BLOCKS) + 1)
    items_end = tl.load(other_tiles_ptr + 3 * (block // BLOCKS) + 2)
    in_tile = block % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tile * TILE + in_tile
    grad_q = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    for item in range(items_begin, items_end):
        grad_q += _load_rows(
            part_ptr + (item * HEADS + head) * (TILE * HEAD_DIM), in_tile, HEAD_DIM, TILE,
            HEAD_DIM, HEAD_BLOCK, False,
        )  # fmt: skip
    at = head * HEAD_DIM
    _store_rows(
        grad_q_ptr + at, grad_q * scale, rows, HEADS * HEAD_DIM, num_tokens, HEAD_DIM, HEAD_BLOCK
    )
    if HAS_SINKS:
        # Decode mode scores every key with q.
        zeros = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
        _store_rows(
            grad_q_sink_ptr + at, zeros, rows, HEADS * HEAD_DIM, num_tokens, HEAD_DIM, HEAD_BLOCK
        )


@triton.jit
def _reduce_sinks_kernel(
    sinks_k_ptr,
    sinks_v_ptr,
    reduced_k_ptr,
    reduced_v_ptr,
    document_ranges_ptr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ELEMENTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # Shares [blocks, H, s * D] of one document -> [G, s * D], summed in a fixed order.
    KV_HEADS: tl.constexpr = HEADS // GROUP
    CHUNKS: tl.constexpr = (ELEMENTS + BLOCK_C - 1) // BLOCK_C
    chunk = tl.program_id(0) % CHUNKS
    kv_head = tl.program_id(0) // CHUNKS % KV_HEADS
    document = tl.program_id(0) // (CHUNKS * KV_HEADS)
    first_block = tl.load(document_ranges_ptr + 2 * document) * BLOCKS
    num_shares = tl.load(document_ranges_ptr + 2 * document + 1) * (BLOCKS * GROUP)
    columns = chunk * BLOCK_C + tl.arange(0, BLOCK_C)
    sum_k = tl.zeros([BLOCK_C], tl.float32)
    sum_v = tl.zeros([BLOCK_C], tl.float32)
    for share in range(0, num_shares, BLOCK_R):
        shares = share + tl.arange(0, BLOCK_R)
        is_there = (shares < num_shares)[:, None] & (columns < ELEMENTS)[None, :]
        row = (first_block + shares // GROUP).to(tl.int64) * HEADS
        row += kv_head * GROUP + shares % GROUP
        at = row[:, None] * ELEMENTS + columns[None, :]
        sum_k += tl.sum(tl.load(sinks_k_ptr + at, mask=is_there, other=0.0), 0)
        sum_v += tl.sum(tl.load(sinks_v_ptr + at, mask=is_there, other=0.0), 0)
    at = (document * KV_HEADS + kv_head).to(tl.int64) * ELEMENTS + columns
    tl.store(reduced_k_ptr + at, sum_k, mask=columns < ELEMENTS)
    tl.store(reduced_v_ptr + at, sum_v, mask=columns < ELEMENTS)


@triton.jit
def _grad_kv_queries(
    grad_k,
    grad_v,
    k,
    v,
    keys,
    q_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    segment_begin_ptr,
    q_row_stride,
    q_head_stride,
    first_head,
    first_a,
    count_a,
    first_b,
    count_b,
    is_own,
    document_first_key,
    num_tokens,
    factor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
):
    # Adds what two runs of query blocks, of every head of the group, give to keys and values. All
    # products have keys as rows, so that none needs the transpose of another.
    count = count_a + count_b
    for step in range(GROUP * count):
        head = first_head + step // count
        nth = step % count
        block = tl.where(nth < count_a, first_a + nth, first_b + nth - count_a)
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = rows < num_tokens
        q = _load_rows(
            q_ptr + head * q_head_stride, rows, q_row_stride, num_tokens,
            HEAD_DIM, HEAD_BLOCK, True,
        )  # fmt: skip
        grad_out = _load_rows(
            grad_out_ptr + head * HEAD_DIM, rows, HEADS * HEAD_DIM, num_tokens,
            HEAD_DIM, HEAD_BLOCK, True,
        )  # fmt: skip
        lse = tl.load(lse_ptr + head * num_tokens + rows, mask=is_row, other=float("inf"))
        delta = tl.load(delta_ptr + head * num_tokens + rows, mask=is_row, other=0.0)
        scores = tl.dot(k, tl.trans(q))
        if MASKED:
            first_key = tl.where(is_own == 1, tl.load(segment_begin_ptr + rows), document_first_key)
            is_seen = (keys[:, None] >= first_key[None, :]) & (keys[:, None] <= rows[None, :])
            scores = tl.where(is_seen, scores, float("-inf"))
        weights = tl.exp2(scores * factor - lse[None, :])
        grad_v = tl.dot(weights.to(grad_out.dtype), grad_out, grad_v)
        grad_weights = tl.dot(v, tl.trans(grad_out))
        grad_scores = weights * (grad_weights - delta[None, :])
        grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k)
    return grad_k, grad_v


@triton.jit
def _grad_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    reduced_k_ptr,
    reduced_v_ptr,
    grad_k_ptr,
    grad_v_ptr,
    key_tiles_ptr,
    segment_begin_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_tokens,
    factor,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    block = tl.program_id(0) // KV_HEADS
    tile = block // (TILE // BLOCK_N)
    first_key = block * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    document = tl.load(key_tiles_ptr + 7 * tile)
    start = tl.load(key_tiles_ptr + 7 * tile + 1)
    end_tile = tl.load(key_tiles_ptr + 7 * tile + 2)
    seen_begin = tl.load(key_tiles_ptr + 7 * tile + 3)
    seen_end = tl.load(key_tiles_ptr + 7 * tile + 4)
    key_end = tl.load(key_tiles_ptr + 7 * tile + 5)
    is_own = tl.load(key_tiles_ptr + 7 * tile + 6)

    # Query tiles [tile, masked_end) pay for a mask; [masked_end, near_end) and the decode-mode
    # tiles [seen_begin, seen_end) see every key of this block.
    near_end = tl.where(is_own == 1, end_tile, tl.minimum(tile + WINDOW // TILE + 1, end_tile))
    masked_end = tl.where(is_own == 1, near_end, tile + 1)
    is_first = (is_own == 0) & (tile * TILE == start)
    if NUM_SINKS > 0:
        masked_end = tl.where(is_first, near_end, masked_end)
    PER_TILE: tl.constexpr = TILE // BLOCK_M
    masked_first = first_key // BLOCK_M
    masked_count = tl.maximum(masked_end * PER_TILE - masked_first, 0)

    k = _load_rows(
        k_ptr + kv_head * k_head_stride, keys, k_row_stride, num_tokens, HEAD_DIM, HEAD_BLOCK, True
    )
    v = _load_rows(
        v_ptr + kv_head * v_head_stride, keys, v_row_stride, num_tokens, HEAD_DIM, HEAD_BLOCK, True
    )
    grad_k = tl.zeros([BLOCK_N, HEAD_BLOCK], tl.float32)
    grad_v = tl.zeros([BLOCK_N, HEAD_BLOCK], tl.float32)
    grad_k, grad_v = _grad_kv_queries(
        grad_k, grad_v, k, v, keys,
        q_ptr, grad_out_ptr, lse_ptr, delta_ptr, segment_begin_ptr, q_row_stride, q_head_stride,
        kv_head * GROUP, masked_first, masked_count, 0, 0,
        is_own, start + NUM_SINKS, num_tokens, factor,
        HEADS, GROUP, HEAD_DIM, HEAD_BLOCK, BLOCK_M, True,
    )  # fmt: skip
    grad_k, grad_v = _grad_kv_queries(
        grad_k, grad_v, k, v, keys,
        q_ptr, grad_out_ptr, lse_ptr, delta_ptr, segment_begin_ptr, q_row_stride, q_head_stride,
        kv_head * GROUP,
        masked_end * PER_TILE, (near_end - masked_end) * PER_TILE,
        seen_begin * PER_TILE, (seen_end - seen_begin) * PER_TILE,
        is_own, start + NUM_SINKS, num_tokens, factor,
        HEADS, GROUP, HEAD_DIM, HEAD_BLOCK, BLOCK_M, False,
    )  # fmt: skip
    if NUM_SINKS > 0:
        sink = tl.where(is_first, keys - start, NUM_SINKS)
        at = (document * KV_HEADS + kv_head) * (NUM_SINKS * HEAD_DIM)
        grad_k += _load_rows(
            reduced_k_ptr + at, sink, HEAD_DIM, NUM_SINKS, HEAD_DIM, HEAD_BLOCK, True
        )
        grad_v += _load_rows(
            reduced_v_ptr + at, sink, HEAD_DIM, NUM_SINKS, HEAD_DIM, HEAD_BLOCK, True
        )
    is_key = (keys < key_end)[:, None]
    grad_k = tl.where(is_key, grad_k * scale, 0.0)
    grad_v = tl.where(is_key, grad_v, 0.0)
    at = kv_head * HEAD_DIM
    KV_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    _store_rows(grad_k_ptr + at, grad_k, keys, KV_STRIDE, num_tokens, HEAD_DIM, HEAD_BLOCK)
    _store_rows(grad_v_ptr + at, grad_v, keys, KV_STRIDE, num_tokens, HEAD_DIM, HEAD_BLOCK)


def _shape(q: Tensor, k: Tensor) -> dict[str, int]:
    heads, head_dim = q.shape[1:]
    return {
        "HEADS": heads,
        "GROUP": heads // k.shape[1],
        "HEAD_DIM": head_dim,
        "HEAD_BLOCK": triton.next_power_of_2(head_dim),
        "TILE": TILE,
    }


def _mask(window: int, num_sinks: int) -> dict[str, int]:
    # A product of tensor cores has at least 16 rows.
    block = max(16, triton.next_power_of_2(num_sinks))
    return {"WINDOW": window, "NUM_SINKS": num_sinks, "SINK_BLOCK": block}


def _launch(config: BlockConfig) -> dict[str, int]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def phase_training_forward(
    q: Tensor,
    q_sink: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PhaseLayout,
    *,
    window: int,
    num_sinks: int,
    scale: float,
    out: Tensor | None = None,
    config: TrainingConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """See `op.phase_training_attention`; arguments are taken as checked there.

    Returns:
        Output [T, H, D] contiguous in q's dtype, and log-sum-exp in base 2 [H, T] fp32, +inf in
        rows of padding.
    """
    num_tokens, heads, head_dim = q.shape
    blocks = (config or default_config(head_dim, q.dtype)).forward
    shape, factor = _shape(q, k), scale * LOG2_E
    if out is None:
        out = torch.empty((num_tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, num_tokens), dtype=torch.float32, device=q.device)
    per_tile = TILE // blocks.block_m * heads
    num_items, num_others = layout.items.shape[0], layout.other_tiles.shape[0]
    if num_items > 0:
        part = torch.empty((num_items, heads, TILE, head_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((num_items, heads, TILE), dtype=torch.float32, device=q.device)
        _item_forward_kernel[(num_items * per_tile,)](
            q, k, v, part, part_lse, layout.items, layout.segment_begin,
            *_strides(q, k, v), num_tokens, factor, **shape, **_launch(blocks),
        )  # fmt: skip
    else:
        part = part_lse = lse
    if num_others > 0:
        _merge_forward_kernel[(num_others * (TILE // _MERGE_ROWS) * heads,)](
            part, part_lse, out, lse, layout.other_tiles, layout.segment_begin, num_tokens,
            HEADS=heads, HEAD_DIM=head_dim, HEAD_BLOCK=shape["HEAD_BLOCK"], TILE=TILE,
            BLOCK_M=_MERGE_ROWS,
        )  # fmt: skip
    if layout.document_tiles.shape[0] > 0:
        _document_forward_kernel[(layout.document_tiles.shape[0] * per_tile,)](
            q, q_sink, k, v, out, lse, layout.document_tiles,
            *_strides(q, q_sink, k, v), num_tokens, factor,
            **shape, **_mask(window, num_sinks), **_launch(blocks),
        )  # fmt: skip
    return out, lse


def phase_training_backward(
    grad_out: Tensor,
    q: Tensor,
    q_sink: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: PhaseLayout,
    *,
    window: int,
    num_sinks: int,
    scale: float,
    grads: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    config: TrainingConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, q_sink, k and v, contiguous, in q's dtype; the same bits in every run.

    Args:
        grad_out: Gradient of the output, [T, H, D] contiguous, in q's dtype.
        q: As in the forward pass, like q_sink, k, v, layout, window, num_sinks and scale.
        q_sink: See q.
        k: See q.
        v: See q.
        out: What the forward pass gave.
        lse: What the forward pass gave.
        layout: See q.
        window: See q.
        num_sinks: See q.
        scale: See q.
        grads: Where to write; every element is written.
        config: Block shapes; by default those of `default_config`.
    """
    num_tokens, heads, head_dim = q.shape
    chosen = config or default_config(head_dim, q.dtype)
    shape, mask, factor = _shape(q, k), _mask(window, num_sinks), scale * LOG2_E
    head_block = shape["HEAD_BLOCK"]
    if grads is None:
        grad_q, grad_q_sink, grad_k, grad_v = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, q_sink, k, v)
        )
    else:
        grad_q, grad_q_sink, grad_k, grad_v = grads
    if num_sinks == 0:
        grad_q_sink.zero_()

    delta = torch.empty_like(lse)
    _delta_kernel[(triton.cdiv(num_tokens * heads, _DELTA_ROWS),)](
        out, grad_out, delta, num_tokens, num_tokens * heads,
        HEADS=heads, HEAD_DIM=head_dim, HEAD_BLOCK=head_block, BLOCK=_DELTA_ROWS,
    )  # fmt: skip

    blocks = chosen.grad_q
    per_tile = TILE // blocks.block_m
    num_items, num_others = layout.items.shape[0], layout.other_tiles.shape[0]
    part = lse
    if num_items > 0:
        part = torch.empty((num_items, heads, TILE, head_dim), dtype=torch.float32, device=q.device)
        _item_grad_q_kernel[(num_items * per_tile * heads,)](
            q, k, v, grad_out, lse, delta, part, layout.items, layout.segment_begin,
            *_strides(q, k, v), num_tokens, factor, **shape, **_launch(blocks),
        )  # fmt: skip
    if num_others > 0:
        _merge_grad_q_kernel[(num_others * (TILE // _MERGE_ROWS) * heads,)](
            part, grad_q, grad_q_sink, layout.other_tiles, num_tokens, scale,
            HEADS=heads, HEAD_DIM=head_dim, HEAD_BLOCK=head_block, TILE=TILE,
            BLOCK_M=_MERGE_ROWS, HAS_SINKS=num_sinks > 0,
        )  # fmt: skip
    num_blocks = layout.document_tiles.shape[0] * per_tile
    reduced_k = reduced_v = sinks_k = sinks_v = lse
    if num_sinks > 0:
        sinks_k, sinks_v = torch.empty(
            (2, num_blocks, heads, num_sinks, head_dim), dtype=torch.float32, device=q.device
        )
    if num_blocks > 0:
        _document_grad_q_kernel[(num_blocks * heads,)](
            q, q_sink, k, v, grad_out, lse, delta, grad_q, grad_q_sink, sinks_k, sinks_v,
            layout.document_tiles, *_strides(q, q_sink, k, v), num_tokens, factor, scale,
            **shape, **mask, **_launch(blocks),
        )  # fmt: skip
    if num_sinks > 0:
        num_documents, kv_heads = layout.document_ranges.shape[0], k.shape[1]
        elements = num_sinks * head_dim
        reduced_k, reduced_v = torch.empty(
            (2, num_documents, kv_heads, elements), dtype=torch.float32, device=q.device
        )
        chunks = triton.cdiv(elements, _REDUCE_COLUMNS)
        _reduce_sinks_kernel[(num_documents * kv_heads * chunks,)](
            sinks_k, sinks_v, reduced_k, reduced_v, layout.document_ranges,
            HEADS=heads, GROUP=shape["GROUP"], ELEMENTS=elements, BLOCKS=per_tile,
            BLOCK_R=_REDUCE_ROWS, BLOCK_C=_REDUCE_COLUMNS,
        )  # fmt: skip
    blocks = chosen.grad_kv
    num_key_blocks = layout.key_tiles.shape[0] * (TILE // blocks.block_n)
    _grad_kv_kernel[(num_key_blocks * k.shape[1],)](
        q, k, v, grad_out, lse, delta, reduced_k, reduced_v, grad_k, grad_v,
        layout.key_tiles, layout.segment_begin, *_strides(q, k, v), num_tokens, factor, scale,
        WINDOW=window, NUM_SINKS=num_sinks, **shape, **_launch(blocks),
    )  # fmt: skip
    return grad_q, grad_q_sink, grad_k, grad_v
