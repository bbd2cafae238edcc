"""What one forward pass runs over. The type of the batch is the phase: never guessed.

Shape suffixes: L layers, H query heads, G KV heads, N tokens of the step, R rows (tokens of all
sequences), D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from orthros_kernels import DecodePlan, PackedSteps, PhaseLayout

LayerKV = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [G, N, D]."""


def layer_views(kv: Tensor) -> tuple[LayerKV, ...]:
    """By layer, views of keys and values [L, 2, G, N, D]; a step must not slice them anew."""
    return tuple((layer[0], layer[1]) for layer in kv.unbind())


def segment_views(segments: Sequence[Tensor]) -> tuple[tuple[LayerKV, ...], ...]:
    """By layer and segment, views of a document's keys and values."""
    return tuple(zip(*(layer_views(segment) for segment in segments), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCarry:
    """All that linear prefill needs of the tokens before a step, however many they are.

    Args:
        window: Keys and values of the last min(start, W) tokens, [L, 2, G, c, D].
        sinks: Keys and values of the document's first s tokens, [L, 2, G, s, D].
    """

    window: Tensor
    sinks: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch:
    """Document tokens in prefill mode: one document, one step.

    Args:
        start: Position of the first token, a multiple of `tile`.
        cos_sin: Rotation at the tokens' positions, two [N, D] fp32.
        sink_cos_sin: Rotation at min(position, W + tile + s - 1), for the scores against sink keys.
        carry: Window and sinks of the steps before; None for the first step.
        kv_out: Receives this step's keys and values, [L, 2, G, N, D].
        window: W, in tokens.
        tile: Tokens per tile.
        num_sinks: s.
    """

    start: int
    cos_sin: tuple[Tensor, Tensor]
    sink_cos_sin: tuple[Tensor, Tensor]
    carry: PrefillCarry | None
    kv_out: Tensor
    window: int
    tile: int
    num_sinks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedContext:
    """One document's keys and values, read once for all rows that attend to it.

    Args:
        layers: `segment_views` of its segments. Not modified.
        rows: Rows of the batch that attend to it, int64; None for all.
        cos_sin: Rotation of those rows at (position - the document's offset); None if that is the
            batch's own.
    """

    layers: tuple[tuple[LayerKV, ...], ...]
    rows: Tensor | None
    cos_sin: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateTail:
    """The tokens that only one sequence sees, and the rows of the batch that extend them.

    Args:
        first_row: First row of this sequence in the batch.
        num_rows: Its rows, consecutive, in order.
        layers: `layer_views` with room for more; tokens [length, length + num_rows) are written
            by the pass.
        length: Tokens already there.
    """

    first_row: int
    num_rows: int
    layers: tuple[LayerKV, ...]
    length: int


@dataclass(slots=True, kw_only=True)
class EvidenceRecord:
    """Queries of chosen layers before rotation, and their log-sum-exp over the whole context.

    Args:
        layers: Layers to record.
        queries: By layer, [H, R, D], filled by the pass.
        lse: By layer, [H, R] fp32, filled by the pass.
    """

    layers: frozenset[int]
    queries: dict[int, Tensor] = field(default_factory=dict)
    lse: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """Rows in decode mode: full softmax over documents and the private tail, causal in the tail.

    Args:
        cos_sin: Rotation at each row's position, two [R, D] fp32.
        documents: Shared contexts; a row may attend to several.
        tails: Together they cover every row once.
        log_length_R: ln(max(1, (position + 1) / 8192)) of each row for the temperature; None when
            no head has one.
        evidence: Where to record queries for the evidence pass; None to record nothing.
    """

    cos_sin: tuple[Tensor, Tensor]
    documents: tuple[SharedContext, ...]
    tails: tuple[PrivateTail, ...]
    log_length_R: Tensor | None = None
    evidence: EvidenceRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPrefillBatch:
    """A `PrefillBatch` as the CUDA kernels take it.

    Args:
        steps: Where the step stands in its document.
        cos_sin: Rotation at the tokens' positions, two [N, D/2] fp32.
        sink_cos_sin: Rotation at positions 0 .. W + tile + s - 1.
        carry: Window and sinks of the steps before; None for the first step.
        kv_out: Receives this step's keys and values, [L, 2, G, N, D]; rows may be strided.
        num_sinks: s.
    """

    steps: PackedSteps
    cos_sin: tuple[Tensor, Tensor]
    sink_cos_sin: tuple[Tensor, Tensor]
    carry: PrefillCarry | None
    kv_out: Tensor
    num_sinks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDecodeBatch:
    """A `DecodeBatch` as the CUDA kernels take it: tables on the device, nothing on the host.

    Args:
        plan: Which row sees which keys.
        entry_cos_sin: Rotation of each of the plan's entries, two [entries, D/2] fp32.
        row_cos_sin: Rotation of each row's key, two [R, D/2] fp32.
        tail_addresses: Address of the segment that takes each row's key and value, int64 [R].
        tail_capacities: Tokens that each such segment has room for, int64 [R].
        tail_rows: Where in it the row is written, int64 [R].
        log_length_R: As in `DecodeBatch`.
        temperature_LH: c_h of every layer, fp32 [L, H]; None without temperatures.
        evidence: As in `DecodeBatch`.
    """

    plan: DecodePlan
    entry_cos_sin: tuple[Tensor, Tensor]
    row_cos_sin: tuple[Tensor, Tensor]
    tail_addresses: Tensor
    tail_capacities: Tensor
    tail_rows: Tensor
    log_length_R: Tensor | None = None
    temperature_LH: Tensor | None = None
    evidence: EvidenceRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """A packed row of documents and their question segments, both phases at once; stores nothing.

    Args:
        layout: Which rows belong to which document and segment.
        cos_sin: Rotation at each row's position, two [R, 1, D] fp32.
        sink_cos_sin: Rotation at min(position, W + tile + s - 1), like it.
        window: W, in tokens.
        num_sinks: s.
    """

    layout: PhaseLayout
    cos_sin: tuple[Tensor, Tensor]
    sink_cos_sin: tuple[Tensor, Tensor]
    window: int
    num_sinks: int


FusedBatch = PackedPrefillBatch | PlannedDecodeBatch
Batch = PrefillBatch | DecodeBatch | FusedBatch | TrainingBatch
