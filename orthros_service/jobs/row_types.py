"""What is asked of every row and what comes back: plain data between the stages of a job."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import pyarrow as pa

from orthros_service.jobs.columns import ColumnPath
from orthros_service.jobs.output_schema import RESULT_COLUMNS
from orthros_service.jobs.plan import JobPlan
from orthros_service.jobs.row_text import repair_surrogates
from orthros_service.jobs.spec import JobSpec
from orthros_service.types import ModelInfo, PrefillModeChoice

_MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTask:
    """What is asked of every row; plain data that crosses to the workers.

    Args:
        text: Column of the documents.
        question: Column of the questions; None when `fixed_question` is for all.
        fixed_question: The one question or instruction; None when rows bring theirs.
        files_without_text: Files that lack the text column.
        prefill_mode, max_tokens, citations: As in the job.
        max_document_bytes: Larger documents become error rows.
        deadline_s: Seconds for one row, retries included.
        num_retries: Times a failure that may pass is tried again; waiting out an overload is free.
    """

    text: ColumnPath
    question: ColumnPath | None
    fixed_question: str | None
    files_without_text: frozenset[str]
    prefill_mode: PrefillModeChoice
    max_tokens: int
    citations: bool
    max_document_bytes: int
    deadline_s: float
    num_retries: int

    @classmethod
    def of(cls, spec: JobSpec, plan: JobPlan) -> Self:
        """Return the task of a planned job."""
        return cls(
            text=plan.text,
            question=plan.question,
            fixed_question=spec.fixed_question,
            files_without_text=plan.files_without_text,
            prefill_mode=spec.prefill_mode,
            max_tokens=spec.max_tokens,
            citations=spec.citations,
            max_document_bytes=spec.max_document_bytes,
            deadline_s=spec.row_deadline_s,
            num_retries=spec.num_retries,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """The added columns of one output row, by the names of the output, and what a job counts."""

    status: Literal["ok", "error"]
    answer: str | None = None
    finish_reason: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    document_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    citations: list[dict[str, Any]] = field(default_factory=list)
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    total_s: float
    has_hidden_characters: bool = False


def failed_result(code: str, message: str, *, started: float) -> RowResult:
    """Return the result of a row that ended in an error.

    Args:
        code: Stable code for programs.
        message: For people; shortened if need be.
        started: `time.monotonic()` when work on the row began.
    """
    return RowResult(
        status="error",
        error_code=code,
        error_message=repair_surrogates(message[:_MAX_MESSAGE_CHARS]),
        total_s=time.monotonic() - started,
    )


def result_table(results: list[RowResult], *, model: ModelInfo) -> Any:
    """Return results as a `pa.Table` of the result columns, in the order given."""
    constants = {"model": model.name, "converted": model.is_converted}
    columns = []
    for column in RESULT_COLUMNS:
        if column.name in constants:
            values = [constants[column.name]] * len(results)
        else:
            values = [getattr(result, column.name) for result in results]
        columns.append(pa.array(values, column.type))
    return pa.Table.from_arrays(columns, schema=RESULT_COLUMNS)
