"""The catalogue's tables, and the row that its callers see."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer, String, Text, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from orthros_service.types import IngestProgress, PrefillModeChoice

SCHEMA_VERSION = 1
"""Version of the tables below; raise it with every change to them."""

DocumentStatus = Literal["queued", "ingesting", "ready", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRow:
    """One document of the catalogue and how far its ingestion has come.

    Args:
        document_id: The document's public name.
        title: The caller's title; may be empty.
        content_key: Names text and state; several documents may share one.
        num_chars: Code points of the stored text.
        num_bytes: Bytes of the stored text in UTF-8.
        mode_choice: Whether the caller forced a prefill mode.
        created_at: When the document was created, in UTC.
        status: "queued", "ingesting", "ready" or "failed".
        mode: The prefill mode that was chosen; None before that.
        num_tokens: Tokens, header included; None before tokenization.
        tokens_done: Tokens prefilled so far.
        tokens_per_s: Prefill rate; None before the first step.
        error_code: Why ingestion failed; None unless it did.
        error_message: The same in a sentence.
        metadata: The caller's own values.
    """

    document_id: str
    title: str
    content_key: str
    num_chars: int
    num_bytes: int
    mode_choice: PrefillModeChoice
    created_at: datetime
    status: DocumentStatus
    mode: Literal["full", "linear"] | None
    num_tokens: int | None
    tokens_done: int
    tokens_per_s: float | None
    error_code: str | None
    error_message: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def progress(self) -> IngestProgress:
        """The ingestion's part of the row."""
        return IngestProgress(
            status=self.status,
            mode=self.mode,
            num_tokens=self.num_tokens,
            tokens_done=self.tokens_done,
            tokens_per_s=self.tokens_per_s,
            error_code=self.error_code,
            error_message=self.error_message,
        )


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time; SQLite keeps no time zone, so it is put back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - SQLAlchemy's signature
        """Store in UTC."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - SQLAlchemy's signature
        """Read as UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """The catalogue's tables."""


class SchemaVersion(Base):
    """One row that says which version of the tables the database holds."""

    __tablename__ = "orthros_schema"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class DocumentRecord(Base):
    """A document as it is stored; `sequence` orders documents by creation and is never reused."""

    __tablename__ = "documents"
    __table_args__ = ({"sqlite_autoincrement": True},)

    sequence: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    document_id: Mapped[str] = mapped_column(String(128), unique=True)
    title: Mapped[str] = mapped_column(Text)
    content_key: Mapped[str] = mapped_column(String(64), index=True)
    num_chars: Mapped[int] = mapped_column(BigInteger)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    mode_choice: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    status: Mapped[str] = mapped_column(String(16), index=True)
    mode: Mapped[str | None] = mapped_column(String(16))
    num_tokens: Mapped[int | None] = mapped_column(BigInteger)
    tokens_done: Mapped[int] = mapped_column(BigInteger)
    tokens_per_s: Mapped[float | None]
    error_code: Mapped[str | None] = mapped_column(String(64))
    error_message: Mapped[str | None] = mapped_column(Text)
    # `metadata` is a name of SQLAlchemy's own.
    caller_metadata: Mapped[dict[str, Any]] = mapped_column("metadata", JSON)

    def to_row(self) -> DocumentRow:
        """The row without the database behind it."""
        names = DocumentRow.__dataclass_fields__.keys() - {"metadata"}
        values = {name: getattr(self, name) for name in names}
        return DocumentRow(**values, metadata=dict(self.caller_metadata))
