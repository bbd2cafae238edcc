"""Packed rows: several documents, each with independent segments behind it, and what is learned."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orthros_kernels import DocumentSpan
from orthros_kernels.phase_training.layout import TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens in decode mode behind a document.

    Args:
        prompt_ids: What the answer follows.
        answer_ids: What is learned.
        weight: Of the answer's mean loss.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    weight: float

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A document, header included, and its segments."""

    document_ids: npt.NDArray[np.int32]
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of a row that it takes."""
        return up(up(len(self.document_ids)) + sum(map(len, self.segments)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One packed row.

    Args:
        tokens: int64 [T]; 0 in padding.
        positions: int64 [T], of every token in its own sequence.
        spans: Where documents and segments lie.
        learned: int64 [n], rows whose next token is learned.
        weights: fp32 [n], of their losses; they sum to 1.
    """

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    spans: tuple[DocumentSpan, ...]
    learned: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]


def up(tokens: int) -> int:
    """The next multiple of a tile."""
    return -(-tokens // TILE) * TILE


def pack(
    examples: Sequence[Example],
    *,
    row_tokens: int,
    document_weight: float,
    document_share: float,
    rng: np.random.Generator,
) -> TrainingRow:
    """Put examples side by side.

    Args:
        examples: Together at most `row_tokens`.
        row_tokens: T.
        document_weight: Loss of the document tokens together, against that of the segments.
        document_share: Share of the document tokens that is drawn for it.
        rng: Draws them.
    """
    tokens = np.zeros(row_tokens, np.int64)
    positions = np.zeros(row_tokens, np.int64)
    spans, learned, weights, inside = [], [], [], []
    at = 0
    for example in examples:
        length = len(example.document_ids)
        tokens[at : at + length] = example.document_ids
        positions[at : at + length] = np.arange(length)
        inside.append(np.arange(at, at + length - 1))
        place, where = up(at + length), []
        for segment in example.segments:
            ids = (*segment.prompt_ids, *segment.answer_ids)
            tokens[place : place + len(ids)] = ids
            positions[place : place + len(ids)] = length + np.arange(len(ids))
            first = place + len(segment.prompt_ids)
            learned.append(np.arange(first - 1, place + len(ids) - 1))
            count = len(segment.answer_ids)
            weights.append(np.full(count, segment.weight / count))
            where.append((place, len(ids)))
            place += len(ids)
        spans.append(DocumentSpan(start=at, num_tokens=length, segments=tuple(where)))
        at = up(place)
    drawn = np.concatenate(inside)
    drawn = drawn[rng.random(len(drawn)) < document_share]
    answers = sum(float(each.sum()) for each in weights) or 1.0
    if document_weight > 0 and len(drawn):
        learned.append(drawn)
        weights.append(np.full(len(drawn), document_weight * answers / len(drawn)))
    all_weights = np.concatenate(weights)
    return TrainingRow(
        tokens=tokens,
        positions=positions,
        spans=tuple(spans),
        learned=np.concatenate(learned),
        weights=(all_weights / all_weights.sum()).astype(np.float32),
    )
