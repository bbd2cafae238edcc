"""What a conversion does: one TOML file, checked, with the command line's options on top."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from orthros_kernels.phase_training.layout import TILE
from orthros_service.errors import InvalidValueError, validation_summary

PERMISSIVE = (
    "public domain", "cc0", "cc-by-4.0", "cc-by-sa", "cc-by-3.0", "mit", "apache-2.0", "psf-2.0",
    "postgresql", "odc-pddl", "bsd",
)  # fmt: skip
"""Beginnings of licence names that training text may have, in lower case."""


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Group):
    """Where training text and questions come from.

    Rows are Parquet with the columns `text` and `licence`; those of questions also `qas`, a list of
    structs with `question`, `answers` and `evidence` (spans of the text).
    """

    texts: tuple[Path, ...] = Field(
        min_length=1, description="Parquet files, or folders of them, of long texts."
    )
    questions: tuple[Path, ...] = Field((), description="The same of texts with questions.")
    licences: tuple[str, ...] = Field(
        PERMISSIVE, description="Rows are used whose licence begins with one of these."
    )
    min_document_tokens: PositiveInt = Field(4096, description="Shortest document of a row.")
    max_document_tokens: PositiveInt = Field(
        131072, description="Longest; lengths are drawn uniformly in their logarithm."
    )
    needles: Annotated[int, Field(ge=0)] = Field(9, description="Facts hidden in a document.")
    passages: Annotated[int, Field(ge=0)] = Field(
        4, description="Passages with a question put into a document."
    )
    continuation_tokens: Annotated[int, Field(ge=0)] = Field(
        256, description="Text behind the document that is read in decode mode."
    )


class TrainingConfig(_Group):
    """How it is trained."""

    steps: PositiveInt = Field(240, description="Rows to train on, one a step.")
    row_tokens: PositiveInt = Field(73728, description="Tokens of a row, a multiple of 128.")
    rank: PositiveInt = Field(128, description="Rank of the updates on every linear layer.")
    learning_rate: float = Field(1.5e-3, gt=0, description="Highest learning rate of AdamW.")
    warm_up: float = Field(0.05, ge=0, lt=1, description="Share of the steps that warm up.")
    floor: float = Field(0.1, ge=0, le=1, description="Share of the rate that the cosine ends at.")
    document_weight: float = Field(
        0.2, ge=0, description="Next-token loss on the document, against 1 for the answers."
    )
    continuation_weight: float = Field(0.3, ge=0, description="The same of continuations.")
    seed: int = Field(0, description="Of data and weights.")
    checkpoint_every: PositiveInt = Field(50, description="Steps between two checkpoints.")


class AttentionConfig(_Group):
    """The attention of the converted model."""

    window: PositiveInt = Field(512, description="W, a multiple of 128.")
    num_sinks: Annotated[int, Field(ge=0, le=TILE)] = Field(4, description="s.")
    rope_theta: float | None = Field(
        None, gt=1, description="Base of the rotation; None keeps the model's."
    )


class ConversionConfig(_Group):
    """One conversion."""

    model: Path = Field(description="Hugging Face directory of the Transformer.")
    output: Path = Field(description="Folder of the run: checkpoints, log, and the result.")
    name: str | None = Field(None, description="Of the result; None adds '-orthros' to the model.")
    device: str = Field("auto", description="'auto', 'cpu', 'cuda' or 'cuda:N'.")
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    attention: AttentionConfig = AttentionConfig()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        data, row = self.data, self.training.row_tokens
        if row % TILE or self.attention.window % TILE:
            raise ValueError(f"row_tokens and window must be multiples of {TILE}")
        if data.min_document_tokens > data.max_document_tokens:
            raise ValueError("min_document_tokens is above max_document_tokens")
        if data.passages and not data.questions:
            raise ValueError("passages need data.questions; set data.passages = 0 to go without")
        return self


def load_config(path: Path, **changes: Any) -> ConversionConfig:
    """Read a conversion's file.

    Args:
        path: TOML; its tables are the groups of `ConversionConfig`.
        changes: Top-level values that win over the file's; None leaves them.

    Raises:
        InvalidValueError: The file cannot be read, or a value is missing, unknown or not allowed.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidValueError(f"{path} cannot be read as TOML: {error}.") from error
    values |= {name: value for name, value in changes.items() if value is not None}
    try:
        return ConversionConfig.model_validate(values)
    except ValidationError as error:
        problems = validation_summary(error.errors(include_url=False, include_input=False))
        raise InvalidValueError(f"{path} is not a valid conversion: {problems}.") from error
