"""The hand-off between prefill and decode: immutable segments of keys and values.

Shapes: L layers, 2 for keys and values, H KV heads, n tokens, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from orthros_service.errors import StateMismatchError
from orthros_service.types import PrefillMode

FORMAT_VERSION = 1

KVDtype = Literal["bfloat16", "float32", "float16"]

STORAGE_DTYPES: dict[KVDtype, np.dtype] = {
    "bfloat16": np.dtype(np.int16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
"""numpy dtype that holds the bits of each K/V dtype; bfloat16 travels as int16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """Everything that must agree before a state made by one worker may be read by another."""

    model_digest: str
    tokenizer_digest: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype
    window: int
    num_sinks: int
    mode: PrefillMode
    segment_tokens: int
    format_version: int = FORMAT_VERSION

    def check_matches(self, expected: "StateLayout") -> None:
        """Reject a state of another layout.

        Raises:
            StateMismatchError: Names every field that differs. `mode` is a property of the
                document, not of the
                worker, so it is not compared.
        """
        wanted = replace(expected, mode=self.mode)
        if wanted != self:
            differing = [
                f"{name} is {getattr(self, name)!r}, this worker has {getattr(wanted, name)!r}"
                for name in self.__dataclass_fields__
                if getattr(self, name) != getattr(wanted, name)
            ]
            raise StateMismatchError(
                "The stored state belongs to another model or format: "
                + "; ".join(differing)
                + ". Ingest the document again."
            )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token."""
        item = STORAGE_DTYPES[self.dtype].itemsize
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * item


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of consecutive tokens of one document with their keys and values. Immutable.

    Ownership: on a cluster the arrays are read-only views of shared memory, valid as long as the
        object is
    referenced; nobody writes to them. On the host, always.

    Args:
        start: Position of the first token in the document's own positions (the header begins at 0).
        token_ids: [n] int32.
        char_starts: [n] int64, first code point of each token in the stored text; 0 for header
            tokens.
        char_ends: [n] int64, one past the last code point; equal to the start for header tokens,
            which cover no text.
        kv: [L, 2, H, n, D] bits of the layout's dtype (int16 for bfloat16); keys carry RoPE at
            local positions.
    """

    start: int
    token_ids: npt.NDArray[np.int32]
    char_starts: npt.NDArray[np.int64]
    char_ends: npt.NDArray[np.int64]
    kv: npt.NDArray[np.generic]

    @property
    def num_tokens(self) -> int:
        """Tokens in this segment."""
        return int(self.token_ids.shape[0])

    @property
    def end(self) -> int:
        """Position one past the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionState:
    """A document as the model remembers it: a layout and its segments, without gaps."""

    layout: StateLayout
    segments: Sequence[Segment]

    def __post_init__(self) -> None:
        position = 0
        for segment in self.segments:
            if segment.start != position:
                raise StateMismatchError(
                    f"Segments are not contiguous: one starts at token {segment.start}, "
                    f"{position} was expected."
                )
            position = segment.end

    @property
    def num_tokens(self) -> int:
        """Tokens in all segments, header included."""
        return self.segments[-1].end if self.segments else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(segment.kv.nbytes for segment in self.segments)


SegmentRef = object
"""How a transport names a segment: itself in process, an object reference on a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHandle:
    """A ready state that can be handed to a decode worker without moving its bytes.

    The holder of the handle keeps the segments alive; dropping it releases them.
    """

    content_key: str
    layout: StateLayout
    segments: tuple[SegmentRef, ...]
    num_tokens: int
    num_bytes: int
