"""Where documents and their question segments lie in a packed row, as tables for the kernels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from orthros_kernels.errors import check

TILE = 128
NO_SEGMENT = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSpan:
    """One document of a packed row and the segments that ask about it.

    Args:
        start: First row of the document, a multiple of 128.
        num_tokens: Document tokens (prefill mode); 0 for text that is wholly in decode mode.
        segments: (first row, tokens) of each decode-mode segment, in order, behind the document;
            the first one starts at a multiple of 128, the others anywhere after it.
    """

    start: int
    num_tokens: int
    segments: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """One past the last row of the document itself."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLayout:
    """The tables of one packed row. A tile of 128 rows never mixes documents or phases.

    Build it with `build`; it does not depend on the window or the sinks.

    Args:
        documents: The spans it was built from.
        num_tokens: Rows of the packed row, T.
        document_tiles: int32 [N, 3], for each tile of document tokens: tile, first row of the
            document, one past its last row.
        other_tiles: int32 [M, 3], for each tile without document tokens: tile, its range of items.
        items: int32 [I, 4], a run of keys for the rows of one such tile: tile, is_own, first key,
            one past the last. Every row of the tile sees every key unless is_own is 1: then a row
            sees its own segment up to itself.
        key_tiles: int32 [tiles, 7], for each tile as keys: document, its first row, one past its
            last tile, first and one past the last tile of decode-mode rows that see all of it, one
            past the last key, is_own. Where is_own is 1 the third number ends the tiles with rows
            of the same segments.
        document_ranges: int32 [B, 2], first row of a document in `document_tiles`, rows.
        segment_begin: int32 [tiles * 128], first row of the segment that a row is in; 2**30
            outside segments.
    """

    documents: tuple[DocumentSpan, ...]
    num_tokens: int
    document_tiles: Tensor
    other_tiles: Tensor
    items: Tensor
    key_tiles: Tensor
    document_ranges: Tensor
    segment_begin: Tensor

    @classmethod
    def build(
        cls,
        documents: Sequence[DocumentSpan],
        *,
        num_tokens: int | None = None,
        split_tokens: int = 4096,
    ) -> "PhaseLayout":
        """Check the spans and build the tables, on the CPU.

        Args:
            documents: Spans in the order of the row; rows between them are padding.
            num_tokens: Rows of the packed row; by default up to the end of the last tile used.
            split_tokens: Keys that one program takes of a long document for decode-mode rows, a
                multiple of 128.

        Raises:
            KernelError: A run is empty, misaligned, out of order, overlapping or out of bounds.
        """
        check(
            split_tokens > 0 and split_tokens % TILE == 0,
            f"split_tokens is {split_tokens}; it must be a positive multiple of {TILE}",
        )
        used = _check_spans(documents)
        if num_tokens is None:
            num_tokens = _num_tiles(used) * TILE
        check(num_tokens >= used, f"num_tokens is {num_tokens}, but the last run ends at {used}")
        num_tiles = _num_tiles(num_tokens)

        document_tiles: list[tuple[int, ...]] = []
        document_ranges: list[tuple[int, ...]] = []
        # Padding until a run claims it: keys that no row sees, rows that see no key.
        key_tiles: list[tuple[int, ...]] = [
            (0, 0, tile, 0, 0, (tile + 1) * TILE, 1) for tile in range(num_tiles)
        ]
        runs: dict[int, list[tuple[int, int, int]]] = {}
        segment_begin = torch.full((num_tiles * TILE,), NO_SEGMENT, dtype=torch.int32)
        for index, document in enumerate(documents):
            tiles = range(document.start // TILE, _num_tiles(document.end))
            document_ranges.append((len(document_tiles), len(tiles)))
            document_tiles += [(tile, document.start, document.end) for tile in tiles]
            seen_by = _segment_tiles(document)
            for tile in tiles:
                key_tiles[tile] = (
                    index, document.start, tiles.stop, seen_by.start, seen_by.stop, document.end, 0
                )  # fmt: skip
            for start, length in document.segments:
                segment_begin[start : start + length] = start
            for tile in seen_by:
                last_end = _last_segment_end(document, tile)
                if last_end is not None:
                    end_tile = _num_tiles(last_end)
                    key_tiles[tile] = (index, document.start, end_tile, 0, 0, (tile + 1) * TILE, 1)
                    runs[tile] = list(_key_runs(document, tile, split_tokens))

        items: list[tuple[int, ...]] = []
        other_tiles: list[tuple[int, ...]] = []
        of_documents = {tile for tile, *_ in document_tiles}
        for tile in range(num_tiles):
            if tile not in of_documents:
                mine = runs.get(tile, [])
                other_tiles.append((tile, len(items), len(items) + len(mine)))
                items += [(tile, *run) for run in mine]
        return cls(
            documents=tuple(documents),
            num_tokens=num_tokens,
            document_tiles=_table(document_tiles, 3),
            other_tiles=_table(other_tiles, 3),
            items=_table(items, 4),
            key_tiles=_table(key_tiles, 7),
            document_ranges=_table(document_ranges, 2),
            segment_begin=segment_begin,
        )

    def to(self, device: torch.device | str) -> "PhaseLayout":
        """The same layout with its tables on a device."""
        return replace(
            self,
            document_tiles=self.document_tiles.to(device),
            other_tiles=self.other_tiles.to(device),
            items=self.items.to(device),
            key_tiles=self.key_tiles.to(device),
            document_ranges=self.document_ranges.to(device),
            segment_begin=self.segment_begin.to(device),
        )


def _check_spans(documents: Sequence[DocumentSpan]) -> int:
    """One past the last row that a run uses."""
    check(len(documents) > 0, "documents is empty; at least one is needed")
    used = 0
    for index, document in enumerate(documents):
        name = f"document {index}"
        check(
            document.num_tokens >= 0 and (document.num_tokens > 0 or len(document.segments) > 0),
            f"{name} has {document.num_tokens} tokens and {len(document.segments)} segments; "
            "it needs at least one token or segment",
        )
        check(
            document.start >= 0 and document.start % TILE == 0,
            f"{name} starts at {document.start}; it must start at a multiple of {TILE}",
        )
        check(
            document.start >= used,
            f"{name} starts at {document.start}, before the run in front of it ends at {used}",
        )
        used = document.end
        for number, (start, length) in enumerate(document.segments):
            name = f"segment {number} of document {index}"
            check(length > 0, f"{name} has {length} tokens; at least one is needed")
            check(
                start >= used,
                f"{name} starts at {start}, before the run in front of it ends at {used}",
            )
            check(
                number > 0 or start % TILE == 0,
                f"{name} starts at {start}; the first one must start at a multiple of {TILE}",
            )
            used = start + length
    return used


def _num_tiles(end: int) -> int:
    return -(-end // TILE)


def _segment_tiles(document: DocumentSpan) -> range:
    """Tiles from a document's first segment to its last."""
    if not document.segments:
        return range(0)
    (first, _), (last, length) = document.segments[0], document.segments[-1]
    return range(first // TILE, _num_tiles(last + length))


def _in_tile(document: DocumentSpan, tile: int) -> list[tuple[int, int]]:
    begin, end = tile * TILE, (tile + 1) * TILE
    return [(s, n) for s, n in document.segments if s < end and s + n > begin]


def _last_segment_end(document: DocumentSpan, tile: int) -> int | None:
    mine = _in_tile(document, tile)
    return sum(mine[-1]) if mine else None


def _key_runs(
    document: DocumentSpan, tile: int, split_tokens: int
) -> Iterator[tuple[int, int, int]]:
    """(is_own, first key, end) of the keys that a tile of decode-mode rows sees."""
    segments = _in_tile(document, tile)
    own_begin, own_end = segments[0][0], sum(segments[-1])
    shared = [(document.start, document.end)]
    if len(segments) == 1 and own_begin < tile * TILE:
        # One long segment: what lies before this tile is seen by all of its rows.
        shared.append((own_begin, tile * TILE))
        own_begin = tile * TILE
    for begin, end in shared:
        for first in range(begin, end, split_tokens):
            yield 0, first, min(first + split_tokens, end)
    yield 1, own_begin, min(own_end, (tile + 1) * TILE)


def _table(rows: list[tuple[int, ...]], columns: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, columns)
