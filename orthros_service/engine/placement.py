"""Where the rows of a decode step stand: positions, the keys they see, where their own keys go."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from orthros_kernels import KeyRun
from orthros_service.engine.sequence import DecodeSequence


@dataclass(slots=True, kw_only=True)
class Placement:
    """One step's rows, sequence after sequence, as plain numbers.

    Args:
        token_ids: Of each row.
        positions: In the whole context.
        runs: Documents, then tails, with the rows that see them.
        entry_offsets: Of each row on each run: what its position loses there.
        tail_addresses: Where each row's tail segment begins in memory.
        tail_capacities: Tokens that it has room for.
        tail_rows: Where in it the row's key and value go.
        signature: Equal for two steps that differ only in that every sequence has one token more.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    runs: list[KeyRun] = field(default_factory=list)
    entry_offsets: list[int] = field(default_factory=list)
    tail_addresses: list[int] = field(default_factory=list)
    tail_capacities: list[int] = field(default_factory=list)
    tail_rows: list[int] = field(default_factory=list)
    signature: tuple[tuple[str, int], ...] = ()

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.token_ids)


def place_rows(rows: Sequence[tuple[DecodeSequence, int]]) -> Placement:
    """Lay out the next `num_rows` pending tokens of each sequence; makes room in the tails.

    A document that several sequences read, even at different offsets, becomes one run: its keys
    are read once for all of them.
    """
    placement = Placement()
    shared: dict[tuple[str, int], tuple[list[int], list[int], DecodeSequence, int]] = {}
    tails: list[KeyRun] = []
    for sequence, num_rows in rows:
        sequence.reserve(num_rows)
        first = placement.num_rows
        own = range(first, first + num_rows)
        placement.token_ids += sequence.pending[:num_rows]
        placement.positions += range(sequence.next_position, sequence.next_position + num_rows)
        placement.tail_addresses += [sequence.kv.data_ptr()] * num_rows
        placement.tail_capacities += [sequence.kv.shape[3]] * num_rows
        placement.tail_rows += range(sequence.length, sequence.length + num_rows)
        limits = range(sequence.length + 1, sequence.length + num_rows + 1)
        tails.append(KeyRun(segments=(sequence.kv,), rows=tuple(own), limits=tuple(limits)))
        seen: dict[str, int] = {}
        for index, document in enumerate(sequence.documents):
            occurrence = seen[document.content_key] = seen.get(document.content_key, -1) + 1
            entry = shared.setdefault((document.content_key, occurrence), ([], [], sequence, index))
            entry[0].extend(own)
            entry[1].extend([document.offset] * num_rows)
    for row_list, offsets, owner, index in shared.values():
        segments = owner.documents[index].segments
        placement.runs.append(KeyRun(segments=segments, rows=tuple(row_list)))
        placement.entry_offsets += offsets
    placement.runs += tails
    placement.entry_offsets += [0] * placement.num_rows
    placement.signature = tuple((s.work.request_id, s.kv.data_ptr()) for s, _ in rows)
    return placement


def place_document_rows(
    token_ids: list[int], kv: Tensor, before: Sequence[Tensor], start: int, begin: int
) -> Placement:
    """Lay out document tokens that are prefilled in decode mode.

    Args:
        token_ids: Of this chunk.
        kv: Takes the step's keys and values, [L, 2, G, n, D].
        before: All segments of the document before the step.
        start: Position of the step's first token.
        begin: First row of the chunk in the step.
    """
    num_rows = len(token_ids)
    rows = tuple(range(num_rows))
    limits = tuple(range(begin + 1, begin + num_rows + 1))
    runs = [KeyRun(segments=tuple(before), rows=rows)] if before else []
    return Placement(
        token_ids=token_ids,
        positions=list(range(start + begin, start + begin + num_rows)),
        runs=[*runs, KeyRun(segments=(kv,), rows=rows, limits=limits)],
        entry_offsets=[0] * num_rows * (len(runs) + 1),
        tail_addresses=[kv.data_ptr()] * num_rows,
        tail_capacities=[kv.shape[3]] * num_rows,
        tail_rows=list(range(begin, begin + num_rows)),
    )
