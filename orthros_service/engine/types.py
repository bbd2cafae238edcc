"""The work that crosses to prefill and decode workers, and what comes back. Torch-free."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orthros_service.state.types import StateHandle, StateLayout
from orthros_service.types import FinishReason, SamplingParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStep:
    """One stateless unit of prefill: the tokens [start, start + n) of one document.

    The carry of the steps before it is read from the context segments that come with it: all of
    them in full
    mode, the first (sinks) and the last (window) in linear mode; see `context_segments`.

    Args:
        layout: Layout of the state being built; `layout.mode` says which attention pattern runs.
        start: Position of the first token; a multiple of `layout.segment_tokens`.
        token_ids: [n] int32; n <= layout.segment_tokens, equal except in the last step.
        char_starts: [n] int64.
        char_ends: [n] int64.
    """

    layout: StateLayout
    start: int
    token_ids: npt.NDArray[np.int32]
    char_starts: npt.NDArray[np.int64]
    char_ends: npt.NDArray[np.int64]


def context_segments(layout: StateLayout, num_done: int) -> tuple[int, ...]:
    """Indices of the finished segments that the next prefill step reads.

    Args:
        layout: Layout of the state being built.
        num_done: Segments finished so far.

    Returns:
        All of them in full mode; in linear mode the first and the last (the window never exceeds a
        segment).
    """
    if layout.mode == "full" or num_done <= 1:
        return tuple(range(num_done))
    return (0, num_done - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWork:
    """One sequence to decode: ready documents, then the private tail of tokens in decode mode.

    Args:
        request_id: Names the sequence for cancellation.
        documents: Handles of ready states, in order. A worker resolves their segments through its
            transport.
        tail_ids: Token ids of everything after the documents, >= 1: question, history, assistant's
            opening.
        sampling: How tokens are chosen; `max_tokens` is already clamped to what fits.
        stop_ids: Token ids that end the answer (end of turn, end of text).
        wants_evidence: Whether to return the attention mass per document token.
        deadline_s: Seconds from receipt until the worker gives up.
    """

    request_id: str
    documents: tuple[StateHandle, ...]
    tail_ids: tuple[int, ...]
    sampling: SamplingParameters
    stop_ids: frozenset[int]
    wants_evidence: bool = False
    deadline_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentEvidence:
    """How much the answer's tokens attended to each token of one document.

    Args:
        char_starts: [n] int64 code points in the stored text; header tokens are left out.
        char_ends: [n] int64.
        mass: [n] float32, attention mass averaged over the answer's tokens and the evidence heads.
    """

    char_starts: npt.NDArray[np.int64]
    char_ends: npt.NDArray[np.int64]
    mass: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeDelta:
    """Newly decoded text; never splits a character, never shows part of a stop string."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFinished:
    """The last output of a sequence."""

    text: str
    finish_reason: FinishReason
    completion_tokens: int
    evidence: tuple[DocumentEvidence, ...] = ()
    queue_s: float = 0.0
    handoff_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0


DecodeOutput = DecodeDelta | DecodeFinished
