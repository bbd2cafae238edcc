"""Training text in Parquet files: any row at any time, with a licence that allows it."""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from orthros_service.errors import InvalidValueError

logger = logging.getLogger(__name__)

_KEPT_GROUPS = 64
_PASSAGE_CHARS = 900
_COLUMNS = ("text", "licence")


@dataclass(frozen=True, slots=True)
class _Group:
    path: Path
    index: int


class Corpus:
    """Rows of several Parquet files under one numbering.

    Args:
        paths: Files, or folders whose `*.parquet` are taken in order of their names.
        licences: Beginnings of the licences that are allowed, in lower case.
        columns: Needed columns beside text and licence.

    Raises:
        InvalidValueError: There is no file, one cannot be read, lacks a column, or no row is
            allowed.
    """

    def __init__(
        self, paths: tuple[Path, ...], *, licences: tuple[str, ...], columns: tuple[str, ...] = ()
    ) -> None:
        self._columns = [*_COLUMNS, *columns]
        self._groups: list[_Group] = []
        self._loaded: OrderedDict[int, pa.Table] = OrderedDict()
        self._allowed: list[tuple[int, int]] = []
        refused: dict[str, int] = {}
        for path in _files(paths):
            self._add(path, licences, refused)
        for licence, count in sorted(refused.items()):
            logger.warning("%d rows with the licence %r are left out", count, licence)
        if not self._allowed:
            raise InvalidValueError(
                "No training row has a licence that is allowed; allowed beginnings are "
                f"{', '.join(licences)}."
            )

    def __len__(self) -> int:
        return len(self._allowed)

    def row(self, number: int) -> dict[str, Any]:
        """One allowed row, with the needed columns."""
        group, index = self._allowed[number]
        row: dict[str, Any] = self._table(group).slice(index, 1).to_pylist()[0]
        return row

    def _add(self, path: Path, licences: tuple[str, ...], refused: dict[str, int]) -> None:
        try:
            file = pq.ParquetFile(path)
            missing = sorted(set(self._columns) - set(file.schema_arrow.names))
            if missing:
                raise InvalidValueError(f"{path} lacks the column(s) {', '.join(missing)}.")
            for index in range(file.num_row_groups):
                names = file.read_row_group(index, columns=["licence"])["licence"].to_pylist()
                self._groups.append(_Group(path, index))
                for row, name in enumerate(names):
                    if str(name).lower().startswith(licences):
                        self._allowed.append((len(self._groups) - 1, row))
                    else:
                        refused[str(name)] = refused.get(str(name), 0) + 1
        except (OSError, pa.ArrowException) as error:
            raise InvalidValueError(f"{path} cannot be read as Parquet: {error}.") from error

    def _table(self, group: int) -> pa.Table:
        if group not in self._loaded:
            while len(self._loaded) >= _KEPT_GROUPS:
                self._loaded.popitem(last=False)
            where = self._groups[group]
            self._loaded[group] = pq.ParquetFile(where.path).read_row_group(
                where.index, columns=self._columns
            )
        self._loaded.move_to_end(group)
        return self._loaded[group]


def passage_around(text: str, begin: int, end: int) -> str:
    """The passage about a span of characters, cut at blanks."""
    first, last = max(0, begin - _PASSAGE_CHARS), min(len(text), end + _PASSAGE_CHARS)
    cut = text[first:last]
    if first > 0:
        cut = cut.split(" ", 1)[-1]
    if last < len(text):
        cut = cut.rsplit(" ", 1)[0]
    return cut.strip()


def _files(paths: tuple[Path, ...]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise InvalidValueError(f"There is no Parquet file at {path}.")
        found += files
    return found
