"""What a batch job is asked to do: one strict model, whoever asks."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from orthros_service.documents.text import check_text
from orthros_service.errors import InvalidValueError, validation_summary
from orthros_service.types import PrefillModeChoice

MIB = 1024 * 1024
# The same words as the paragraph style of the summaries endpoint.
SUMMARY_INSTRUCTION = "Summarize the text above in one paragraph. Keep to what the text says."

_NonEmpty = Annotated[str, Field(min_length=1)]


class JobSpec(BaseModel):
    """A batch job over Parquet: where from, where to, and what to ask of every row."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    input: _NonEmpty = Field(description="Local Parquet file, or a folder of them at any depth.")
    output: _NonEmpty = Field(description="Local folder for the results; absent or empty.")
    question: _NonEmpty | None = Field(None, description="One question for every row.")
    question_column: _NonEmpty | None = Field(None, description="Column that holds each question.")
    summarize: bool = Field(False, description="Summarize each document instead of asking.")
    text_column: _NonEmpty = Field(
        "text", description='Column of the documents; `a.b` is a struct field, `"a.b"` a name.'
    )
    id_column: _NonEmpty | None = Field(
        None, description="Your identifier: nulls and repeats in it are reported, never a failure."
    )
    max_tokens: PositiveInt = Field(64, description="Most tokens per answer.")
    prefill_mode: PrefillModeChoice = Field("auto", description="'auto' lets the length decide.")
    citations: bool = Field(True, description="Whether to find the passages behind each answer.")
    concurrency: PositiveInt = Field(8, description="Rows in flight at once.")
    limit: PositiveInt | None = Field(None, description="Take only the first rows.")
    skip_bad_files: bool = Field(False, description="Go on without files that cannot be read.")
    max_document_bytes: PositiveInt = Field(64 * MIB, description="Largest document, in bytes.")
    row_deadline_s: float = Field(3600.0, gt=0, description="Seconds that one row may take.")
    num_retries: Annotated[int, Field(ge=0)] = Field(
        2, description="Times a row is tried again after a failure that may pass."
    )
    chunk_rows: PositiveInt = Field(256, description="Most rows per output file.")
    chunk_bytes: PositiveInt = Field(
        16 * MIB, description="Most input bytes per output file; a larger row stands alone."
    )

    @model_validator(mode="after")
    def _exactly_one_task(self) -> Self:
        tasks = [self.question is not None, self.question_column is not None, self.summarize]
        if sum(tasks) != 1:
            raise ValueError("give exactly one of question, question_column and summarize")
        if self.question is not None:
            check_text(self.question, field="question")
        return self

    @property
    def fixed_question(self) -> str | None:
        """The instruction that every row gets; None when each row brings its own question."""
        return SUMMARY_INSTRUCTION if self.summarize else self.question

    @property
    def output_path(self) -> Path:
        """The output folder, absolute, so that every worker means the same place."""
        return Path(self.output).absolute()


def build_spec(**values: object) -> JobSpec:
    """Check the values of a job.

    Raises:
        InvalidValueError: A value is missing, unknown or not allowed; the message names each.
    """
    try:
        return JobSpec.model_validate(values)
    except ValidationError as error:
        problems = validation_summary(error.errors(include_url=False, include_input=False))
        raise InvalidValueError(f"The batch job is not valid: {problems}.") from error
