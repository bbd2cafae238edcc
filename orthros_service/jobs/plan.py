"""Everything that can be refused is refused here, from footers alone, before any work starts."""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthros_service.errors import InvalidValueError
from orthros_service.jobs.columns import ColumnPath, find_column, find_text_column
from orthros_service.jobs.footers import InputFile, read_footers
from orthros_service.jobs.listing import BadFile, Listing, list_input
from orthros_service.jobs.output_schema import ADDED_COLUMNS, JOB_FOLDER, SUCCESS_FILE
from orthros_service.jobs.schemas import unify
from orthros_service.jobs.spec import JobSpec

_log = logging.getLogger(__name__)

_NUM_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """The first rows of one row group: all of them unless the job's limit falls inside.

    `first_row` counts from the start of the file, so that (file, row) names a row for good.
    """

    path: str
    row_group: int
    first_row: int
    num_rows: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadUnit:
    """What one read task reads: a large row group, or several small ones."""

    index: int
    ranges: tuple[RowRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A checked job; plain data that workers can receive.

    Args:
        root: Folder that file paths are relative to.
        files: Every readable input file.
        bad_files: Files left out because the job said so.
        num_skipped: Hidden files and files of other kinds under the input.
        schema: The `pa.Schema` of all files together.
        text: Column of the documents.
        question: Column of the questions, if rows bring their own.
        id_column: Column of the caller's identifiers, if named.
        units: What to read; together each planned row exactly once.
        num_rows: Rows that the job takes, after its limit.
        files_without_text: Files that lack the text column; their rows become error rows.
        warnings: What the caller should know before the job starts.
    """

    root: str
    files: tuple[InputFile, ...]
    bad_files: tuple[BadFile, ...]
    num_skipped: int
    schema: Any
    text: ColumnPath
    question: ColumnPath | None
    id_column: ColumnPath | None
    units: tuple[ReadUnit, ...]
    num_rows: int
    files_without_text: frozenset[str]
    warnings: tuple[str, ...]


def make_plan(spec: JobSpec) -> JobPlan:
    """Check a job against its files.

    Raises:
        NotFoundError: The input does not exist.
        InvalidValueError: The input, its columns or the output cannot be used; files are named.
    """
    _check_output(spec)
    listing = list_input(spec.input)
    files, bad_footers = read_footers(listing.root, listing.paths)
    bad_files = (*listing.bad_files, *bad_footers)
    _check_files(spec, listing, files=files, bad_files=bad_files)
    schema = unify({file.path: file.schema for file in files})
    text = find_text_column(schema, spec.text_column, purpose="text")
    question = None
    if spec.question_column is not None:
        question = find_text_column(schema, spec.question_column, purpose="question")
    id_column = None if spec.id_column is None else find_column(schema, spec.id_column)
    _check_clashes(schema)
    units = tuple(_pack(_ranges(files, spec.limit), spec))
    without_text = frozenset(file.path for file in files if not text.is_in(file.schema))
    return JobPlan(
        root=listing.root,
        files=tuple(files),
        bad_files=bad_files,
        num_skipped=listing.num_skipped,
        schema=schema,
        text=text,
        question=question,
        id_column=id_column,
        units=units,
        num_rows=sum(each.num_rows for unit in units for each in unit.ranges),
        files_without_text=without_text,
        warnings=tuple(
            f"{path} has no column {spec.text_column!r}; its rows become error rows."
            for path in sorted(without_text)
        ),
    )


def _check_output(spec: JobSpec) -> None:
    if "://" in spec.output:
        raise InvalidValueError(f"The output {spec.output!r} is a URI; give a local folder.")
    output, source = Path(spec.output).resolve(), Path(spec.input).resolve()
    if output == source or (source.is_dir() and source in output.parents):
        raise InvalidValueError(
            f"The output {spec.output!r} lies inside the input, so results would be read as "
            "input; choose a folder elsewhere."
        )
    if output.exists() and not output.is_dir():
        raise InvalidValueError(f"The output {spec.output!r} is a file; give a folder.")
    if output.is_dir():
        _check_folder(spec.output, output)
    parent = next(each for each in (output, *output.parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InvalidValueError(f"The output {spec.output!r} cannot be created under {parent}.")


def _check_folder(name: str, folder: Path) -> None:
    found = {each.name for each in folder.iterdir()}
    if SUCCESS_FILE in found:
        raise InvalidValueError(
            f"The output folder {name!r} is not empty: it holds a finished job; give a new or an "
            "empty one."
        )
    # A job that got no further than making its folder leaves nothing to lose.
    if JOB_FOLDER in found and found != {JOB_FOLDER}:
        num_parts = sum(each.endswith(".parquet") for each in found)
        raise InvalidValueError(
            f"The output folder {name!r} is not empty: it holds {num_parts} file(s) of a job that "
            f"was interrupted (there is no {SUCCESS_FILE}), which cannot be taken up. Delete the "
            "folder and run the job again, or give another one."
        )
    if found - {JOB_FOLDER}:
        raise InvalidValueError(
            f"The output folder {name!r} is not empty; give a new or an empty one."
        )


def _check_files(
    spec: JobSpec,
    listing: Listing,
    *,
    files: list[InputFile],
    bad_files: tuple[BadFile, ...],
) -> None:
    if bad_files and not spec.skip_bad_files:
        named = " ".join(bad.message for bad in bad_files[:_NUM_NAMED])
        more = len(bad_files) - _NUM_NAMED
        raise InvalidValueError(
            f"{len(bad_files)} file(s) cannot be read: {named}"
            + (f" And {more} more." if more > 0 else "")
            + " Repair or remove them, or pass --skip-bad-files.",
            num_bad_files=len(bad_files),
        )
    for bad in bad_files:
        _log.warning("skipping a bad file: %s", bad.message)
    if not files:
        seen = listing.num_skipped + len(bad_files)
        raise InvalidValueError(
            f"There are no Parquet files under {spec.input!r} ({seen} file(s) seen and skipped: "
            "hidden, of another kind, or bad).",
            num_skipped=seen,
        )
    for file in files:
        for name, count in Counter(file.schema.names).items():
            if count > 1:
                times = "twice" if count == 2 else f"{count} times"
                raise InvalidValueError(
                    f"Column {name!r} occurs {times} in {file.path}; rename one.", column=name
                )


def _check_clashes(schema: Any) -> None:
    taken = [name for name in ADDED_COLUMNS.names if name in schema.names]
    if taken:
        raise InvalidValueError(
            f"The input already has {', '.join(map(repr, taken))}, which the job would add; "
            "rename these columns in the input first.",
            column=taken[0],
        )


def _ranges(files: list[InputFile], limit: int | None) -> Iterator[RowRange]:
    left = limit
    for file in files:
        first_row = 0
        for index, (group_rows, num_bytes) in enumerate(file.row_groups):
            num_rows = group_rows if left is None else min(group_rows, left)
            if num_rows > 0:
                yield RowRange(
                    path=file.path,
                    row_group=index,
                    first_row=first_row,
                    num_rows=num_rows,
                    num_bytes=num_bytes,
                )
            first_row += group_rows
            left = None if left is None else left - num_rows


def _pack(ranges: Iterator[RowRange], spec: JobSpec) -> Iterator[ReadUnit]:
    """Put neighbours together up to the size of one output file: many tiny files are few tasks."""
    index, batch, rows, size = 0, list[RowRange](), 0, 0
    for each in ranges:
        is_full = rows + each.num_rows > spec.chunk_rows or size + each.num_bytes > spec.chunk_bytes
        if batch and is_full:
            yield ReadUnit(index=index, ranges=tuple(batch))
            index, batch, rows, size = index + 1, [], 0, 0
        batch.append(each)
        rows, size = rows + each.num_rows, size + each.num_bytes
    if batch:
        yield ReadUnit(index=index, ranges=tuple(batch))
