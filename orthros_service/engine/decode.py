"""Decode: full attention over ready documents, many sequences in one batch."""

import time
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from orthros_service.engine.evidence import document_evidence
from orthros_service.engine.fused_decode import FusedDecoder
from orthros_service.engine.placement import place_rows
from orthros_service.engine.sampling import sample
from orthros_service.engine.sequence import (
    DecodeSequence,
    QueryTrace,
    ResidentDocuments,
    new_sequence,
)
from orthros_service.engine.types import DecodeDelta, DecodeFinished, DecodeOutput, DecodeWork
from orthros_service.errors import EngineError, OrthrosError
from orthros_service.model.attention import log_length
from orthros_service.model.batches import (
    DecodeBatch,
    EvidenceRecord,
    LayerKV,
    PrivateTail,
    SharedContext,
)
from orthros_service.model.loading import LoadedModel
from orthros_service.model.rope import RotaryTable
from orthros_service.state.types import AttentionState, StateLayout
from orthros_service.tokenization.stream import TextStream

# Rows of new tails that join one step, so that a long question does not hold up the running
# answers.
EXTEND_TOKENS = 512
_FIRST_CAPACITY = 256

Layers = tuple[tuple[LayerKV, ...], ...]
StepResult = tuple[str, DecodeOutput | OrthrosError]
Rows = list[tuple[DecodeSequence, int]]
LogitsOf = Callable[[list[int]], Tensor]


class DecodeEngine:
    """Continuous batching over shared documents. Not thread-safe: one caller drives it."""

    def __init__(
        self,
        loaded: LoadedModel,
        layout: StateLayout,
        *,
        new_stream: Callable[[], TextStream],
        uses_kernels: bool | None = None,
    ) -> None:
        """Bind a model.

        Args:
            loaded: The model on its device.
            layout: What the documents' states look like; `mode` is ignored.
            new_stream: Makes a sequence's detokenizer.
            uses_kernels: Whether steps run through the CUDA kernels' interfaces; None for wherever
                the model lies on a GPU.
        """
        self._model = loaded.model
        self._device = loaded.device
        self._layout = layout
        self._rotary = RotaryTable(loaded.config, device=loaded.device)
        self._evidence_layers = frozenset(loaded.orthros.evidence_layers)
        self._new_stream = new_stream
        is_fused = loaded.device.type == "cuda" if uses_kernels is None else uses_kernels
        self._fused = FusedDecoder(loaded) if is_fused else None
        self._sequences: dict[str, DecodeSequence] = {}
        self._resident: ResidentDocuments = WeakValueDictionary()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences)

    @property
    def num_sequences(self) -> int:
        """Sequences in the batch."""
        return len(self._sequences)

    def add(self, work: DecodeWork, states: Sequence[AttentionState]) -> None:
        """Take a sequence into the batch; its tail runs in the next steps.

        Args:
            work: The request; its id must not be in the batch.
            states: One per `work.documents`, in order; kept alive until the sequence ends.

        Raises:
            StateMismatchError: A state was made by another model.
            EngineError: The id is already being decoded, or the tail is empty.
        """
        for state in states:
            state.layout.check_matches(self._layout)
        if work.request_id in self._sequences:
            raise EngineError(
                f"Request {work.request_id} is already being decoded.", phase="decode"
            )
        if not work.tail_ids:
            raise EngineError("The tail holds no token; it needs at least one.", phase="decode")
        self._sequences[work.request_id] = new_sequence(
            work,
            states,
            resident=self._resident,
            empty_kv=self._model.new_kv(max(_FIRST_CAPACITY, len(work.tail_ids))),
            device=self._device,
            stream=self._new_stream(),
        )

    def cancel(self, request_id: str) -> bool:
        """Drop a sequence and its memory at once; returns whether it was there."""
        return self._sequences.pop(request_id, None) is not None

    @torch.inference_mode()
    def step(self) -> list[StepResult]:
        """One forward pass: a token for every running sequence, a slice of the tail for new ones.

        Returns:
            Outputs by request id. A sequence that failed is dropped and returned with its error;
            others go on.
        """
        rows = self._plan_rows()
        if not rows:
            return []
        forward = self._forward if self._fused is None else self._fused_forward
        logits_of, evidence = forward(rows)
        complete, last_rows, row = [], [], 0
        for sequence, num_rows in rows:
            row += num_rows
            sequence.length += num_rows
            del sequence.pending[:num_rows]
            if not sequence.pending:
                complete.append(sequence)
                last_rows.append(row - 1)
        if not complete:
            return []
        self._trace(complete, last_rows, evidence)
        return self._sample(complete, logits_of(last_rows))

    def _forward(self, rows: Rows) -> tuple[LogitsOf, EvidenceRecord | None]:
        batch, token_ids = self._batch(rows)
        hidden = self._model.hidden_states(token_ids, batch)
        return lambda last_rows: self._model.logits(hidden[last_rows]), batch.evidence

    def _fused_forward(self, rows: Rows) -> tuple[LogitsOf, EvidenceRecord | None]:
        assert self._fused is not None
        placement = place_rows(rows)
        if all(sequence.num_generated for sequence, _ in rows):
            logits, evidence = self._fused.repeated_step(placement)
            return lambda last_rows: logits[last_rows], evidence
        wants_evidence = any(s.work.wants_evidence and s.documents for s, _ in rows)
        hidden, record = self._fused.hidden_states(placement, wants_evidence=wants_evidence)
        return lambda last_rows: self._model.logits(hidden[last_rows]), record

    def _plan_rows(self) -> Rows:
        budget = EXTEND_TOKENS
        rows = []
        for sequence in self._sequences.values():
            is_running = sequence.num_generated > 0
            num_rows = 1 if is_running else min(len(sequence.pending), budget)
            if num_rows == 0:
                continue
            budget -= 0 if is_running else num_rows
            rows.append((sequence, num_rows))
        return rows

    def _batch(self, rows: Rows) -> tuple[DecodeBatch, Tensor]:
        token_ids: list[int] = []
        positions: list[int] = []
        tails = []
        shared: dict[tuple[str, int], tuple[list[int], list[int], Layers]] = {}
        for sequence, num_rows in rows:
            first = len(token_ids)
            sequence.reserve(num_rows)
            tails.append(
                PrivateTail(
                    first_row=first,
                    num_rows=num_rows,
                    layers=sequence.layers,
                    length=sequence.length,
                )
            )
            token_ids += sequence.pending[:num_rows]
            positions += range(sequence.next_position, sequence.next_position + num_rows)
            seen: dict[str, int] = {}
            for document in sequence.documents:
                occurrence = seen[document.content_key] = seen.get(document.content_key, -1) + 1
                entry = shared.setdefault(
                    (document.content_key, occurrence), ([], [], document.layers)
                )
                entry[0].extend(range(first, first + num_rows))
                entry[1].extend([document.offset] * num_rows)
        position_R = torch.tensor(positions, device=self._device)
        documents = tuple(
            self._shared(entry_rows, offsets, layers, position_R)
            for entry_rows, offsets, layers in shared.values()
        )
        wants_evidence = any(s.work.wants_evidence and s.documents for s, _ in rows)
        batch = DecodeBatch(
            cos_sin=self._rotary.cos_sin(position_R),
            documents=documents,
            tails=tuple(tails),
            log_length_R=log_length(position_R, self._model.orthros.decode_temperature),
            evidence=EvidenceRecord(layers=self._evidence_layers) if wants_evidence else None,
        )
        return batch, torch.tensor(token_ids, device=self._device)

    def _shared(
        self, rows: list[int], offsets: list[int], layers: Layers, position_R: Tensor
    ) -> SharedContext:
        has_all_rows = len(rows) == position_R.shape[0]
        row_index = None if has_all_rows else torch.tensor(rows, device=self._device)
        cos_sin = None
        if any(offsets):
            local = position_R if row_index is None else position_R[row_index]
            cos_sin = self._rotary.cos_sin(local - torch.tensor(offsets, device=self._device))
        return SharedContext(layers=layers, rows=row_index, cos_sin=cos_sin)

    def _trace(
        self, complete: list[DecodeSequence], last_rows: list[int], evidence: EvidenceRecord | None
    ) -> None:
        """Keep the queries of answer tokens, for sequences that want evidence."""
        if evidence is None:
            return
        for sequence, row in zip(complete, last_rows, strict=True):
            if sequence.work.wants_evidence and sequence.documents:
                sequence.traces.append(
                    QueryTrace(
                        position=sequence.next_position - 1,
                        queries={n: q[:, row].clone() for n, q in evidence.queries.items()},
                        lse={n: lse[:, row].clone() for n, lse in evidence.lse.items()},
                    )
                )

    def _sample(self, complete: list[DecodeSequence], logits: Tensor) -> list[StepResult]:
        results: list[StepResult] = []
        # A sum is finite only if every term is; one pass instead of three.
        finite = logits.sum(-1, dtype=torch.float32).isfinite().tolist()
        healthy = [index for index, is_finite in enumerate(finite) if is_finite]
        for index, is_finite in enumerate(finite):
            if not is_finite:
                request_id = complete[index].work.request_id
                self._sequences.pop(request_id, None)
                error = EngineError(
                    "The model produced logits that are not finite.", phase="decode"
                )
                results.append((request_id, error))
        if not healthy:
            return results
        sequences = [complete[index] for index in healthy]
        tokens = sample(
            logits[healthy],
            [s.work.sampling for s in sequences],
            [s.generator for s in sequences],
        ).tolist()
        for sequence, token in zip(sequences, tokens, strict=True):
            text, count = sequence.accept(token)
            request_id = sequence.work.request_id
            if text or count:
                results.append((request_id, DecodeDelta(text=text, num_tokens=count)))
            if sequence.finish_reason is not None:
                self._sequences.pop(request_id, None)
                results.append((request_id, self._finish(sequence)))
        return results

    def _finish(self, sequence: DecodeSequence) -> DecodeFinished:
        assert sequence.finish_reason is not None
        assert sequence.first_token_at is not None
        ended_at = time.perf_counter()
        # The first query is that of the prompt's last token: not part of the answer, and measured
        # to cite less well, but an answer of one token may have no other.
        traces = sequence.traces[1:] or sequence.traces
        if sequence.num_generated == 0:
            traces = []
        return DecodeFinished(
            text=sequence.text,
            finish_reason=sequence.finish_reason,
            completion_tokens=sequence.num_generated,
            evidence=document_evidence(traces, sequence.documents, self._rotary),
            first_token_s=sequence.first_token_at - sequence.added_at,
            decode_s=ended_at - sequence.first_token_at,
        )
