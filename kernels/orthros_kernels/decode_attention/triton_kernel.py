"""Decode-mode attention on CUDA: split over keys, then one merge by log-sum-exp.

An item of the plan is a range of keys for a block of entries (rows on a run). The query heads of a
KV head and the rows that share a document lie side by side in one matrix product, so a document's
keys and values are read once for all of them.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from orthros_kernels.decode_attention.plan import DecodePlan
from orthros_kernels.triton_common import LOG2_E, head_columns, rotated_queries

LN_2 = 0.6931471805599453
_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
}


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Keys per step of the loop and launch parameters."""

    block_n: int
    num_warps: int
    num_stages: int


CONFIGS = (
    DecodeConfig(128, 4, 3),
    DecodeConfig(128, 4, 2),
    DecodeConfig(64, 4, 3),
    DecodeConfig(64, 8, 3),
)


def default_config(block_m: int, head_dim: int) -> DecodeConfig:
    """The configuration that was fastest on Hopper for so many rows."""
    if head_dim > 64:
        return DecodeConfig(64, 4, 3) if block_m < 128 else DecodeConfig(64, 8, 3)
    return DecodeConfig(128, 4, 3) if block_m < 128 else DecodeConfig(64, 4, 3)


@cache
def _can_overlap(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it still runs (from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _decode_kernel(
    q_ptr,
    cos_ptr,
    sin_ptr,
    items_ptr,
    entry_rows_ptr,
    limits_ptr,
    log_length_ptr,
    temperature_ptr,
    out_ptr,
    lse_ptr,
    q_row_stride,
    q_head_stride,
    layer,
    factor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV_TYPE: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        # The merge may take its place now; it waits for our results by itself.
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    HEADS: tl.constexpr = GROUP * KV_HEADS
    IS_INT8: tl.constexpr = KV_TYPE == tl.int8
    PADDED: tl.constexpr = HALF_BLOCK != HALF
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    item = items_ptr + 8 * tl.program_id(0)
    kv_head = tl.program_id(1)
    address = tl.load(item)
    capacity = tl.load(item + 1)
    key_begin = tl.load(item + 2).to(tl.int32)
    key_end = tl.load(item + 3).to(tl.int32)
    first_entry = tl.load(item + 4)
    num_entries = tl.load(item + 5)
    first_slot = tl.load(item + 6)
    if num_entries == 0:
        return

    lane = tl.arange(0, BLOCK_M)
    in_block = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    is_entry = in_block < num_entries
    entry = first_entry + in_block
    row = tl.load(entry_rows_ptr + entry, mask=is_entry, other=0)
    limit = tl.load(limits_ptr + entry, mask=is_entry, other=0).to(tl.int32)
    half = tl.arange(0, HALF_BLOCK)
    is_half = is_entry[:, None] & (half < HALF)[None, :]
    q_at = q_ptr + row[:, None] * q_row_stride + head[:, None] * q_head_stride + half[None, :]
    first = tl.load(q_at, mask=is_half, other=0.0).to(tl.float32)
    second = tl.load(q_at + HALF, mask=is_half, other=0.0).to(tl.float32)
    angle = entry[:, None] * HALF + half[None, :]
    cos = tl.load(cos_ptr + angle, mask=is_half, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=is_half, other=0.0)
    if HAS_TEMPERATURE:
        stretch = tl.load(temperature_ptr + head) * tl.load(log_length_ptr + row)
        q = rotated_queries(first, second, cos, sin, (factor * (1 + stretch))[:, None], DTYPE)
    else:
        q = rotated_queries(first, second, cos, sin, factor, DTYPE)

    base = address.to(tl.pointer_type(KV_TYPE))
    base = tl.multiple_of(base, 16)
    head_tokens = capacity * HEAD_DIM
    k_ptr = base + ((layer * 2) * KV_HEADS + kv_head).to(tl.int64) * head_tokens
    v_ptr = base + ((layer * 2 + 1) * KV_HEADS + kv_head).to(tl.int64) * head_tokens
    columns, is_column = head_columns(HALF_BLOCK, HALF)
    if IS_INT8:
        scale_at = tl.load(item + 7).to(tl.pointer_type(tl.float32))
        k_scale = tl.load(scale_at + (layer * 2) * KV_HEADS + kv_head)
        v_scale = tl.load(scale_at + (layer * 2 + 1) * KV_HEADS + kv_head)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 2 * HALF_BLOCK], tl.float32)
    end = tl.minimum(key_end, tl.max(limit, 0))
    for first_key in range(key_begin, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        at = keys[:, None].to(tl.int64) * HEAD_DIM + columns[None, :]
        if PADDED:
            is_there = (keys < end)[:, None] & is_column[None, :]
        else:
            is_there = (keys < end)[:, None] & (columns >= 0)[None, :]
        k = tl.load(k_ptr + at, mask=is_there, other=0).to(DTYPE)
        v = tl.load(v_ptr + at, mask=is_there, other=0).to(DTYPE)
        scores = tl.dot(q, tl.trans(k))
        if IS_INT8:
            scores *= k_scale
        is_seen = (keys[None, :] < limit[:, None]) & (keys < end)[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DTYPE), v, acc * decay[:, None])
        highest = new_highest

    is_empty = total == 0
    out = acc / tl.where(is_empty, 1.0, total)[:, None]
    if IS_INT8:
        out *= v_scale
    lse = tl.where(is_empty, float("-inf"), highest + tl.log2(tl.where(is_empty, 1.0, total)))
    place = (first_slot + in_block) * HEADS + head
    tl.store(lse_ptr + place, lse, mask=is_entry)
    out_at = out_ptr + place[:, None] * HEAD_DIM + columns[None, :]
    tl.store(out_at, out, mask=is_entry[:, None] & is_column[None, :])


@triton.jit
def _merge_kernel(
    out_parts_ptr,
    lse_parts_ptr,
    row_offsets_ptr,
    row_slots_ptr,
    out_ptr,
    lse_ptr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(row_offsets_ptr + row).to(tl.int32)
    end = tl.load(row_offsets_ptr + row + 1).to(tl.int32)
    column = tl.arange(0, DIM_BLOCK)
    is_column = column < HEAD_DIM
    highest = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM_BLOCK], tl.float32)
    for first in range(begin, end, SLOT_BLOCK):
        index = first + tl.arange(0, SLOT_BLOCK)
        is_slot = index < end
        slot = tl.load(row_slots_ptr + index, mask=is_slot, other=0)
        place = slot * HEADS + head
        lse = tl.load(lse_parts_ptr + place, mask=is_slot, other=float("-inf"))
        parts = tl.load(
            out_parts_ptr + place[:, None] * HEAD_DIM + column[None, :],
            mask=is_slot[:, None] & is_column[None, :],
            other=0.0,
        )
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(lse - shift)
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(parts * weights[:, None], 0)
        highest = new_highest
    # A row of a padded batch has no slot: it gets zeros, not NaN.
    is_empty = total == 0
    safe = tl.where(is_empty, 1.0, total)
    place = (row * HEADS + head).to(tl.int64)
    out = (acc / safe).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * HEAD_DIM + column, out, mask=is_column)
    lse = tl.where(is_empty, float("-inf"), (highest + tl.log2(safe)) * 0.6931471805599453)
    tl.store(lse_ptr + place, lse)


def decode_attention_triton(
    q: Tensor,
    plan: DecodePlan,
    layer: int,
    *,
    cos_sin: tuple[Tensor, Tensor],
    num_kv_heads: int,
    scale: float,
    log_length: Tensor | None = None,
    temperature: Tensor | None = None,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """See `op.decode_attention`; arguments are taken as checked there."""
    num_rows, num_heads, head_dim = q.shape
    size = plan.size
    chosen = config or default_config(size.block_m, head_dim)
    out_parts = q.new_empty((size.slots, num_heads, head_dim), dtype=torch.float32)
    lse_parts = q.new_empty((size.slots, num_heads), dtype=torch.float32)
    if out is None:
        out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    lse = q.new_empty((num_rows, num_heads), dtype=torch.float32)
    overlaps = _can_overlap(q.device)
    # Only the CUDA launcher knows the option.
    launch = {"launch_pdl": True} if overlaps else {}
    has_temperature = log_length is not None and temperature is not None
    _decode_kernel[(size.items, num_kv_heads)](
        q, cos_sin[0], cos_sin[1], plan.items, plan.entry_rows, plan.limits,
        log_length if has_temperature else lse, temperature if has_temperature else lse,
        out_parts, lse_parts, q.stride(0), q.stride(1), layer, scale * LOG2_E,
        GROUP=num_heads // num_kv_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=max(8, triton.next_power_of_2(head_dim // 2)),
        BLOCK_M=size.block_m,
        BLOCK_N=chosen.block_n,
        KV_TYPE=_TYPES[plan.kv_dtype],
        HAS_TEMPERATURE=has_temperature,
        OVERLAPS=overlaps,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **launch,
    )  # fmt: skip
    _merge_kernel[(num_rows, num_heads)](
        out_parts, lse_parts, plan.row_offsets, plan.row_slots, out, lse,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        SLOT_BLOCK=min(128, max(16, triton.next_power_of_2(size.slots // max(1, num_rows)))),
        OVERLAPS=overlaps,
        num_warps=4,
        **launch,
    )  # fmt: skip
    return out, lse
