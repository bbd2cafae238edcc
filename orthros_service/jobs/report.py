"""The account of a finished job: what went in, what came out, what went wrong, how long it took."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from orthros_service.jobs.output import Receipt
from orthros_service.jobs.plan import JobPlan
from orthros_service.jobs.spec import JobSpec
from orthros_service.types import ModelInfo


class BadFileEntry(BaseModel):
    """A file that was left out."""

    path: str
    reason: str
    message: str


class IdCounts(BaseModel):
    """What the caller's identifiers look like; they are carried, never relied on."""

    column: str
    nulls: int
    repeated: int | None = Field(description="Rows whose id another row has; null: not comparable.")


class JobReport(BaseModel):
    """Content of `_job/report.json`."""

    model_config = ConfigDict(frozen=True)

    spec: JobSpec
    model: str
    converted: bool
    model_digest: str
    started_at: str = Field(description="RFC 3339, UTC.")
    seconds: float
    rows_in: int
    rows_out: int
    rows_ok: int
    rows_failed: int
    errors_by_code: dict[str, int]
    document_tokens: int
    prompt_tokens: int
    completion_tokens: int
    tokens_per_s: float = Field(description="Tokens of all three kinds per second of the job.")
    files_in: int
    files_out: int
    files_skipped: int = Field(description="Hidden files and files of other kinds.")
    bad_files: list[BadFileEntry]
    ids: IdCounts | None
    rows_with_hidden_characters: int
    strings_repaired: int = Field(description="Input strings that were not UTF-8.")
    warnings: list[str]

    @property
    def is_complete(self) -> bool:
        """Whether every row was answered and no file was left out."""
        return self.rows_failed == 0 and not self.bad_files


def build_report(
    spec: JobSpec,
    *,
    plan: JobPlan,
    receipts: Sequence[Receipt],
    model: ModelInfo,
    started_at: str,
    seconds: float,
) -> JobReport:
    """Add up the receipts of a job."""
    errors = Counter[str]()
    for receipt in receipts:
        errors.update(receipt.errors)
    num_rows = sum(receipt.num_rows for receipt in receipts)
    document_tokens = sum(receipt.document_tokens for receipt in receipts)
    prompt_tokens = sum(receipt.prompt_tokens for receipt in receipts)
    completion_tokens = sum(receipt.completion_tokens for receipt in receipts)
    num_tokens = document_tokens + prompt_tokens + completion_tokens
    return JobReport(
        spec=spec,
        model=model.name,
        converted=model.is_converted,
        model_digest=model.digest,
        started_at=started_at,
        seconds=seconds,
        rows_in=plan.num_rows,
        rows_out=num_rows,
        rows_ok=num_rows - errors.total(),
        rows_failed=errors.total(),
        errors_by_code=dict(errors.most_common()),
        document_tokens=document_tokens,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        tokens_per_s=num_tokens / seconds if seconds > 0 else 0.0,
        files_in=len(plan.files),
        files_out=len(receipts),
        files_skipped=plan.num_skipped,
        bad_files=[
            BadFileEntry(path=bad.path, reason=bad.reason, message=bad.message)
            for bad in plan.bad_files
        ],
        ids=_count_ids(spec.output_path, plan),
        rows_with_hidden_characters=sum(receipt.num_hidden for receipt in receipts),
        strings_repaired=sum(receipt.num_repaired for receipt in receipts),
        warnings=list(plan.warnings),
    )


def _count_ids(output: Path, plan: JobPlan) -> IdCounts | None:
    if plan.id_column is None:
        return None
    column = plan.id_column
    paths = sorted(output.glob("part-*.parquet"))
    tables = [pq.read_table(path, columns=[column.parts[0]], partitioning=None) for path in paths]
    ids = column.read(pa.concat_tables(tables)).drop_null()
    return IdCounts(
        column=column.name,
        nulls=plan.num_rows - len(ids),
        repeated=_count_repeated(ids),
    )


def _count_repeated(ids: Any) -> int | None:
    try:
        counts = pc.value_counts(ids).field("counts")
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        # Lists, structs and maps have no equality in Arrow's hash kernels.
        return None
    repeated = pc.sum(pc.if_else(pc.greater(counts, 1), counts, 0)).as_py()
    return int(repeated or 0)
