"""Packed rows of documents and their question segments, as they are trained on and evaluated.

A row holds several documents, each followed by independent segments: a question with its answer, or
the text that follows the document. One file holds all rows of a set, so that every run of the
ablation sees the same tokens in the same order.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from orthros_service.conversion.rows import up

ROW_TOKENS = 72 * 1024
NEEDLE, UNSEEN_NEEDLE, PASSAGE_QUESTION, CONTINUATION = range(4)
KINDS = ("needle", "needle, unseen form", "question on a passage", "continuation")


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows of one set.

    Args:
        tokens: uint16 [rows, ROW_TOKENS]; 0 in padding.
        documents: int32 [N, 3]: row, first token, number of tokens.
        segments: int32 [M, 6]: document, first token, number of tokens, first answer token within
            it, kind, where the answer lies in the document (first token; -1 if nowhere).
    """

    tokens: npt.NDArray[np.uint16]
    documents: npt.NDArray[np.int32]
    segments: npt.NDArray[np.int32]

    def save(self, path: Path) -> None:
        """Write one compressed file."""
        np.savez_compressed(
            path, tokens=self.tokens, documents=self.documents, segments=self.segments
        )

    @staticmethod
    def load(path: Path) -> "RowSet":
        """Read what `save` wrote."""
        with np.load(path) as file:
            return RowSet(file["tokens"], file["documents"], file["segments"])


@dataclass(slots=True)
class RowBuilder:
    """Collects documents into rows of ROW_TOKENS."""

    rows: list[npt.NDArray[np.uint16]]
    documents: list[tuple[int, int, int]]
    segments: list[tuple[int, int, int, int, int, int]]
    used: int = ROW_TOKENS

    @staticmethod
    def empty() -> "RowBuilder":
        """A builder without rows."""
        return RowBuilder([], [], [])

    @property
    def free(self) -> int:
        """Tokens that are left in the last row."""
        return ROW_TOKENS - self.used

    def start_row(self) -> None:
        """Begin the next row."""
        self.rows.append(np.zeros(ROW_TOKENS, np.uint16))
        self.used = 0

    def add(
        self, document: list[int], segments: list[tuple[list[int], list[int], int, int]]
    ) -> None:
        """Put a document and its segments (prompt, answer, kind, place) into the last row."""
        row, begin = self.rows[-1], self.used
        row[begin : begin + len(document)] = document
        self.documents.append((len(self.rows) - 1, begin, len(document)))
        at = up(begin + len(document))
        for prompt, answer, kind, place in segments:
            ids = [*prompt, *answer]
            row[at : at + len(ids)] = ids
            index = len(self.documents) - 1
            self.segments.append((index, at, len(ids), len(prompt), kind, place))
            at += len(ids)
        self.used = up(at)

    def build(self) -> RowSet:
        """All rows so far."""
        return RowSet(
            np.stack(self.rows),
            np.array(self.documents, np.int32),
            np.array(self.segments, np.int32),
        )


def room(document: int, segments: list[tuple[list[int], list[int], int, int]]) -> int:
    """Tokens of a row that a document with these segments takes."""
    return up(up(document) + sum(len(prompt) + len(answer) for prompt, answer, *_ in segments))
