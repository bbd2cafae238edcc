"""Which rows attend to which keys, as tables that a kernel reads.

A plan depends on the composition of a batch, not on the layer: it is built once per step (or once
per many steps, while only the limits of the tails grow) and serves every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from orthros_kernels.errors import check

ITEM_FIELDS = 8
"""Address, capacity, first key, end of keys, first entry, entries, first slot, scale address."""
# Shorter splits cost more in partial results than they gain in parallel work.
_MIN_SPLIT = 256
_SPLIT_GRAIN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRun:
    """The keys and values of one document or one private tail, and the rows that see them.

    Args:
        segments: In order, each [L, 2, G, n, D]; all of one dtype; contiguous. The memory is read
            by address: whoever holds a plan must keep them alive.
        rows: Rows of the batch that attend to it; each once.
        limits: For a tail (one segment): how many of its keys each row sees, itself included. None
            lets every row see every key.
        scales: For int8 segments: fp32 [L, 2, G] each, what a stored number is multiplied by.
    """

    segments: tuple[Tensor, ...]
    rows: tuple[int, ...]
    limits: tuple[int, ...] | None = None
    scales: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSize:
    """Room in a plan's tables; two plans of one size can replace each other in place."""

    rows: int
    entries: int
    items: int
    slots: int
    block_m: int

    def holds(self, other: "PlanSize") -> bool:
        """Whether a plan of the other size fits into these tables."""
        return (
            self.rows >= other.rows
            and self.entries >= other.entries
            and self.items >= other.items
            and self.slots >= other.slots
            and self.block_m >= other.block_m
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Tables of one batch composition; an *entry* is one row on one run of keys.

    Args:
        size: Room in the tables.
        tables: All tables in one int64 tensor: the views below share its memory.
        items: [items, ITEM_FIELDS]: a range of keys for a block of entries.
        entry_rows: [entries], the row of each entry.
        limits: [entries], how many keys of its run the entry sees.
        row_offsets: [rows + 1], where a row's slots begin in `row_slots`.
        row_slots: [slots], the partial results of each row.
        kv_dtype: Of the stored keys and values.
        keep_alive: What the addresses point into.
    """

    size: PlanSize
    tables: Tensor
    items: Tensor
    entry_rows: Tensor
    limits: Tensor
    row_offsets: Tensor
    row_slots: Tensor
    kv_dtype: torch.dtype
    keep_alive: tuple[KeyRun, ...]


def build_plan(
    runs: Sequence[KeyRun],
    *,
    num_rows: int,
    num_q_heads: int,
    num_programs: int,
    size: PlanSize | None = None,
) -> DecodePlan:
    """Split the work of a batch into items of about equal cost.

    Args:
        runs: Every row must be in at least one run and see at least one key.
        num_rows: R.
        num_q_heads: H.
        num_programs: Programs that fill the device; items are cut so that about so many run.
        size: Room to leave in the tables; None leaves none.

    Returns:
        The plan on the CPU; `move_plan` takes it to a device.

    Raises:
        KernelError: A run is empty, names a row that is not there, or does not fit the others.
    """
    check(len(runs) > 0, "runs must hold at least one run of keys")
    check(all(run.segments for run in runs), "a run must hold at least one segment")
    first = runs[0].segments[0]
    num_kv_heads = first.shape[2]
    check(num_q_heads % num_kv_heads == 0, f"{num_q_heads} query heads on {num_kv_heads} KV heads")
    group = num_q_heads // num_kv_heads
    for run in runs:
        _check_run(run, first, num_rows)
    widest = max(len(run.rows) for run in runs)
    block_m = _block_m(widest, group) if size is None else size.block_m
    block_entries = block_m // group
    keys = sum(
        segment.shape[3] * -(-len(run.rows) // block_entries)
        for run in runs
        for segment in run.segments
    )
    split = max(_MIN_SPLIT, _round_up(-(-keys * num_kv_heads // num_programs), _SPLIT_GRAIN))

    items: list[tuple[int, ...]] = []
    entry_rows: list[int] = []
    limits: list[int] = []
    slots_of_row: list[list[int]] = [[] for _ in range(num_rows)]
    slot = 0
    for run in runs:
        first_entry = len(entry_rows)
        entry_rows += run.rows
        limits += run.limits or [2**31 - 1] * len(run.rows)
        for index, segment in enumerate(run.segments):
            capacity = segment.shape[3]
            scale = 0 if run.scales is None else run.scales[index].data_ptr()
            for begin in range(0, capacity, split):
                for entry in range(0, len(run.rows), block_entries):
                    count = min(block_entries, len(run.rows) - entry)
                    items.append(
                        (
                            segment.data_ptr(), capacity, begin, min(begin + split, capacity),
                            first_entry + entry, count, slot, scale,
                        )
                    )  # fmt: skip
                    for row in run.rows[entry : entry + count]:
                        slots_of_row[row].append(slot)
                        slot += 1
    check(
        size is not None or all(slots_of_row),
        "every row must attend to at least one run, unless the tables leave room",
    )
    needed = PlanSize(
        rows=num_rows, entries=len(entry_rows), items=len(items), slots=slot, block_m=block_m
    )
    room = needed if size is None else size
    check(room.holds(needed), f"a plan of {needed} does not fit into tables of {room}")
    offsets = [0, *accumulate(len(slots) for slots in slots_of_row)]
    return _fill(
        room,
        [number for item in items for number in item],
        entry_rows,
        limits,
        offsets,
        [s for slots in slots_of_row for s in slots],
        first.dtype,
        tuple(runs),
    )


def move_plan(plan: DecodePlan, device: torch.device) -> DecodePlan:
    """The same plan with its tables on a device, by one copy."""
    return _views(plan.size, plan.tables.to(device), plan.kv_dtype, plan.keep_alive)


def overwrite_plan(target: DecodePlan, plan: DecodePlan) -> DecodePlan:
    """Put a plan's tables where another's are (a captured graph reads them there)."""
    check(target.size == plan.size, f"tables of {target.size} cannot take a plan of {plan.size}")
    target.tables.copy_(plan.tables)
    return _views(plan.size, target.tables, plan.kv_dtype, plan.keep_alive)


def _check_run(run: KeyRun, first: Tensor, num_rows: int) -> None:
    check(len(run.rows) > 0, "a run must be seen by at least one row")
    check(len(set(run.rows)) == len(run.rows), "a row may see a run only once")
    check(
        min(run.rows) >= 0 and max(run.rows) < num_rows,
        f"a run names rows {min(run.rows)} to {max(run.rows)}; there are {num_rows}",
    )
    for segment in run.segments:
        check(
            segment.dim() == 5 and segment.shape[3] > 0,
            f"a segment has shape {tuple(segment.shape)}; [L, 2, G, n, D] with n > 0 is needed",
        )
        same = (segment.shape[:3], segment.shape[4:]) == (first.shape[:3], first.shape[4:])
        check(same, f"segments {tuple(segment.shape)} and {tuple(first.shape)} do not fit")
        check(segment.is_contiguous(), "a segment must be contiguous")
        check(segment.dtype == first.dtype, f"segments are {segment.dtype} and {first.dtype}")
        check(segment.device == first.device, "segments are on different devices")
    if run.limits is not None:
        check(len(run.segments) == 1, "limits need a run of one segment")
        check(len(run.limits) == len(run.rows), "limits must hold one number per row")
    is_quantized = first.dtype == torch.int8
    check(
        (run.scales is not None) == is_quantized,
        "int8 segments need scales, and only they do",
    )
    if run.scales is not None:
        check(len(run.scales) == len(run.segments), "scales must hold one tensor per segment")
        for scale in run.scales:
            check(
                scale.shape == first.shape[:3]
                and scale.dtype == torch.float32
                and scale.is_contiguous(),
                f"a scale must be contiguous fp32 {tuple(first.shape[:3])}",
            )


def _block_m(rows: int, group: int) -> int:
    """Rows of a block's matrix products: a power of two of at least 16."""
    wanted = min(128, rows * group)
    block = 16
    while block < wanted or block < group:
        block *= 2
    return block


def _round_up(number: int, grain: int) -> int:
    return -(-number // grain) * grain


def _fill(
    size: PlanSize,
    items: list[int],
    entry_rows: list[int],
    limits: list[int],
    offsets: list[int],
    slots: list[int],
    kv_dtype: torch.dtype,
    runs: tuple[KeyRun, ...],
) -> DecodePlan:
    """Tables with what is left over set to nothing: items without entries, entries of row 0."""
    parts = (
        (items, size.items * ITEM_FIELDS),
        (entry_rows, size.entries),
        (limits, size.entries),
        (offsets, size.rows + 1),
        (slots, size.slots),
    )
    numbers: list[int] = []
    for part, room in parts:
        numbers += part
        numbers += [0] * (room - len(part))
    return _views(size, torch.tensor(numbers, dtype=torch.int64), kv_dtype, runs)


def _views(
    size: PlanSize, tables: Tensor, kv_dtype: torch.dtype, runs: tuple[KeyRun, ...]
) -> DecodePlan:
    items, entry_rows, limits, offsets, slots = torch.split(
        tables, [size.items * ITEM_FIELDS, size.entries, size.entries, size.rows + 1, size.slots]
    )
    return DecodePlan(
        size=size,
        tables=tables,
        items=items.view(size.items, ITEM_FIELDS),
        entry_rows=entry_rows,
        limits=limits,
        row_offsets=offsets,
        row_slots=slots,
        kv_dtype=kv_dtype,
        keep_alive=runs,
    )
