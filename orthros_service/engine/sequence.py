"""One sequence being decoded: its documents, its private tail and the text that it has produced."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from orthros_service.engine.sampling import make_generator
from orthros_service.engine.stopping import StopMatcher
from orthros_service.engine.types import DecodeWork
from orthros_service.model.batches import LayerKV, layer_views, segment_views
from orthros_service.state.tensors import kv_tensor
from orthros_service.state.types import AttentionState
from orthros_service.tokenization.stream import TextStream
from orthros_service.types import FinishReason


@dataclass(slots=True, kw_only=True, weakref_slot=True, eq=False)
class ResidentDocument:
    """A document's keys and values on the device: one copy, however many sequences read it."""

    segments: tuple[Tensor, ...]
    layers: tuple[tuple[LayerKV, ...], ...]


ResidentDocuments = WeakValueDictionary[tuple[str, str, int], ResidentDocument]
"""By content key, prefill mode and number of tokens; a document goes with its last reader."""


@dataclass(slots=True, kw_only=True)
class DocumentContext:
    """One document of a sequence: its tensors and its place in the composed context."""

    content_key: str
    state: AttentionState
    resident: ResidentDocument
    offset: int

    @property
    def layers(self) -> tuple[tuple[LayerKV, ...], ...]:
        """By layer and segment, views of keys and values."""
        return self.resident.layers

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """Keys and values of each segment, [L, 2, G, n, D]."""
        return self.resident.segments


@dataclass(slots=True, kw_only=True)
class QueryTrace:
    """What the evidence pass needs of one token: by layer, unrotated queries [H, D], lse [H]."""

    position: int
    queries: dict[int, Tensor]
    lse: dict[int, Tensor]


@dataclass(slots=True, kw_only=True)
class DecodeSequence:
    """Mutable state of one request inside the decode engine.

    `pending` are token ids that are known but have not run through the model: the rest of the tail
    at first, then the
    one token that was sampled last.
    """

    work: DecodeWork
    documents: list[DocumentContext]
    pending: list[int]
    kv: Tensor
    layers: tuple[LayerKV, ...]
    stream: TextStream
    stops: StopMatcher
    generator: torch.Generator | None
    length: int = 0
    num_generated: int = 0
    text: str = ""
    finish_reason: FinishReason | None = None
    traces: list[QueryTrace] = field(default_factory=list)
    added_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None

    @property
    def document_tokens(self) -> int:
        """Tokens of all documents: the position of the tail's first token."""
        return sum(document.state.num_tokens for document in self.documents)

    @property
    def next_position(self) -> int:
        """Position of the next pending token."""
        return self.document_tokens + self.length

    def reserve(self, num_rows: int) -> None:
        """Make room for so many more tail tokens, doubling so that copying stays linear."""
        needed = self.length + num_rows
        capacity = self.kv.shape[3]
        if needed > capacity:
            grown = self.kv.new_empty(
                (*self.kv.shape[:3], max(needed, 2 * capacity), self.kv.shape[4])
            )
            grown[:, :, :, : self.length] = self.kv[:, :, :, : self.length]
            self.kv = grown
            self.layers = layer_views(grown)

    def accept(self, token_id: int) -> tuple[str, int]:
        """Take one sampled token; returns the text to show now, and 1 if the token counts."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        if token_id in self.work.stop_ids:
            self.finish_reason = "stop"
            shown, count = self._rest(), 0
        else:
            self.num_generated += 1
            self.pending = [token_id]
            shown, has_stopped = self.stops.push(self.stream.push(token_id))
            count = 1
            if has_stopped:
                self.finish_reason = "stop"
            elif self.num_generated >= self.work.sampling.max_tokens:
                self.finish_reason = "length"
                shown += self._rest()
        self.text += shown
        return shown, count

    def _rest(self) -> str:
        """Text that was held back for an unfinished character or a possible stop string."""
        rest, has_stopped = self.stops.push(self.stream.flush())
        return rest if has_stopped else rest + self.stops.flush()


def new_sequence(
    work: DecodeWork,
    states: Sequence[AttentionState],
    *,
    resident: ResidentDocuments,
    empty_kv: Tensor,
    device: torch.device,
    stream: TextStream,
) -> DecodeSequence:
    """Bind a request to its documents' states, on the device."""
    documents, offset = [], 0
    for handle, state in zip(work.documents, states, strict=True):
        key = (handle.content_key, state.layout.mode, state.num_tokens)
        there = resident.get(key)
        if there is None:
            segments = tuple(kv_tensor(s, state.layout.dtype, device) for s in state.segments)
            there = ResidentDocument(segments=segments, layers=segment_views(segments))
            resident[key] = there
        documents.append(
            DocumentContext(
                content_key=handle.content_key, state=state, resident=there, offset=offset
            )
        )
        offset += state.num_tokens
    return DecodeSequence(
        work=work,
        documents=documents,
        pending=list(work.tail_ids),
        kv=empty_kv,
        layers=layer_views(empty_kv),
        stream=stream,
        stops=StopMatcher(work.sampling.stop),
        generator=make_generator(work.sampling),
    )
