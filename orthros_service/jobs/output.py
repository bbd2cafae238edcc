"""Write a job's files so that no reader sees half of one, and prove that no row is lost.

`<output>/part-*.parquet` hold the rows, `_job/report.json` the account of the job, and `_SUCCESS`
comes last. Names with `_` are hidden from every reader of such folders.
"""

import os
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from orthros_service.errors import InvalidValueError
from orthros_service.jobs.failures import IncompleteOutputError
from orthros_service.jobs.output_schema import (
    IDENTITY_COLUMNS,
    JOB_FOLDER,
    SUCCESS_FILE,
    build_output_schema,
)
from orthros_service.jobs.plan import JobPlan
from orthros_service.jobs.reading import Chunk
from orthros_service.jobs.row_types import RowResult, result_table
from orthros_service.jobs.utf8 import repair_strings
from orthros_service.types import ModelInfo

REPORT_FILE = "report.json"
_TEMPORARY_FOLDER = "tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one written file holds; the sums of these are the job's report.

    Args:
        name: Stem of the file.
        num_rows: Rows in it.
        errors: Rows with an error, by code.
        document_tokens, prompt_tokens, completion_tokens: Sums over its rows.
        num_hidden: Rows whose document holds characters that a person does not see.
        num_repaired: Input strings that were not UTF-8 and were repaired.
    """

    name: str
    num_rows: int
    errors: dict[str, int] = field(default_factory=dict)
    document_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_hidden: int = 0
    num_repaired: int = 0

    def to_values(self) -> dict[str, Any]:
        """Return plain values that JSON can carry."""
        return asdict(self)


def prepare_output(output: Path) -> None:
    """Create the output folder and what a job needs inside it, and try to write there.

    Raises:
        InvalidValueError: It cannot be created or written.
    """
    folder = output / JOB_FOLDER / _TEMPORARY_FOLDER
    probe = folder / "probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"1")
        probe.unlink()
    except OSError as error:
        raise InvalidValueError(
            f"The output folder {str(output)!r} cannot be written: {error.strerror or error}; "
            "give another one."
        ) from error


def write_chunk(
    output: Path, chunk: Chunk, *, results: list[RowResult], model: ModelInfo
) -> Receipt:
    """Write the rows of a chunk with their results under the chunk's name.

    Writing the same chunk again replaces the file, so a repeated task adds no row.

    Args:
        output: Folder that `prepare_output` has made.
        chunk: The rows.
        results: One per row, in the same order.
        model: Named in every row.
    """
    rows, num_repaired = repair_strings(chunk.rows)
    added = result_table(results, model=model)
    columns = [*rows.columns, *chunk.identity.columns, *added.columns]
    table = pa.Table.from_arrays(columns, schema=build_output_schema(rows.schema))
    _write(output, chunk.name, table)
    return Receipt(
        name=chunk.name,
        num_rows=table.num_rows,
        errors=dict(Counter(each.error_code for each in results if each.error_code is not None)),
        document_tokens=sum(each.document_tokens or 0 for each in results),
        prompt_tokens=sum(each.prompt_tokens or 0 for each in results),
        completion_tokens=sum(each.completion_tokens or 0 for each in results),
        num_hidden=sum(each.has_hidden_characters for each in results),
        num_repaired=num_repaired,
    )


def write_empty(output: Path, plan: JobPlan) -> Receipt:
    """Write one file without rows: an input without rows still gives a readable output."""
    name = "part-000000-00000"
    _write(output, name, build_output_schema(plan.schema).empty_table())
    return Receipt(name=name, num_rows=0)


def verify_output(output: Path, *, plan: JobPlan, receipts: list[Receipt]) -> None:
    """Check that the files hold each planned row exactly once.

    Raises:
        IncompleteOutputError: A row is missing or double, or a file was not ours; no success
            marker may be written.
    """
    expected_files = {f"{receipt.name}.parquet" for receipt in receipts}
    found_files = {path.name for path in output.glob("*.parquet")}
    if expected_files != found_files:
        missing, foreign = expected_files - found_files, found_files - expected_files
        raise IncompleteOutputError(
            f"The output folder lacks {len(missing)} written file(s) and holds {len(foreign)} "
            "that the job did not write; is it one folder for all workers, and for this job alone?",
            num_missing=len(missing),
            num_foreign=len(foreign),
        )
    tables = [
        pq.read_table(output / name, columns=IDENTITY_COLUMNS.names, partitioning=None)
        for name in sorted(found_files)
    ]
    rows = pa.concat_tables(tables)
    distinct = rows.group_by(IDENTITY_COLUMNS.names).aggregate([])
    found = {each["values"]: each["counts"] for each in _count(distinct.column("_source_file"))}
    expected = Counter[str]()
    for unit in plan.units:
        for each in unit.ranges:
            expected[each.path] += each.num_rows
    if rows.num_rows != plan.num_rows or found != dict(expected):
        raise IncompleteOutputError(
            f"The input has {plan.num_rows} rows; the output has {rows.num_rows}, of which "
            f"{distinct.num_rows} are distinct. Run the job again into another folder.",
            rows_in=plan.num_rows,
            rows_out=rows.num_rows,
            rows_distinct=distinct.num_rows,
        )


def finish_output(output: Path, *, report: str) -> None:
    """Write the report and, last of all, the marker of success."""
    folder = output / JOB_FOLDER
    temporary = folder / _TEMPORARY_FOLDER
    for leftover in temporary.iterdir():
        leftover.unlink()
    temporary.rmdir()
    draft = folder / f".{REPORT_FILE}"
    draft.write_text(report, encoding="utf-8")
    draft.replace(folder / REPORT_FILE)
    (output / SUCCESS_FILE).touch()


def _count(column: Any) -> list[dict[str, Any]]:
    counts: list[dict[str, Any]] = pc.value_counts(column).to_pylist()
    return counts


def _write(output: Path, name: str, table: Any) -> None:
    temporary = output / JOB_FOLDER / _TEMPORARY_FOLDER / f"{name}.{uuid.uuid4().hex}"
    # A file is complete before it gets its name, also after a power cut.
    with temporary.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(output / f"{name}.parquet")
