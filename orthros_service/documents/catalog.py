"""The catalogue: which documents there are and how far their ingestion has come."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select, true, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from orthros_service.documents.database import Database
from orthros_service.documents.rows import DocumentRecord, DocumentRow
from orthros_service.errors import InvalidValueError, NotFoundError
from orthros_service.types import IngestProgress, PrefillModeChoice

DocumentRows = list[DocumentRow]


class DocumentCatalog:
    """Rows of documents in an SQL database: SQLite, or PostgreSQL by URL.

    Synchronous and thread-safe: call it from a thread, never on the event loop. Several processes
    may use one database.

    Args:
        database_url: SQLAlchemy URL; tables are created if missing.

    Raises:
        InvalidValueError: The URL cannot be used, or the tables are newer than this release.
        UnavailableError: The database cannot be reached. Every method may raise this too.
    """

    def __init__(self, database_url: str) -> None:
        self._database = Database(database_url)

    def create(
        self,
        document_id: str,
        *,
        title: str,
        content_key: str,
        num_chars: int,
        num_bytes: int,
        mode_choice: PrefillModeChoice,
        metadata: Mapping[str, Any] | None = None,
    ) -> DocumentRow:
        """Add a document.

        It starts as "queued", or where its content's ingestion stands if another document already
        has the same content; a failed one is queued again.

        Raises:
            InvalidValueError: The id is taken.
        """
        record = DocumentRecord(
            document_id=document_id,
            title=title,
            content_key=content_key,
            num_chars=num_chars,
            num_bytes=num_bytes,
            mode_choice=mode_choice,
            created_at=datetime.now(UTC),
            status="queued",
            tokens_done=0,
            caller_metadata=dict(metadata or {}),
        )
        with self._database.write() as session:
            if _find(session, document_id) is not None:
                raise InvalidValueError(f"The document id {document_id!r} is taken.")
            sibling = session.scalars(
                select(DocumentRecord)
                .where(DocumentRecord.content_key == content_key)
                .where(DocumentRecord.status != "failed")
                .order_by(DocumentRecord.sequence.desc())
                .limit(1)
            ).first()
            if sibling is not None:
                _set_progress(record, sibling.to_row().progress)
            session.add(record)
            try:
                session.flush()
            except IntegrityError as error:
                raise InvalidValueError(f"The document id {document_id!r} is taken.") from error
            return record.to_row()

    def get(self, document_id: str) -> DocumentRow:
        """One document.

        Raises:
            NotFoundError: There is none of this id.
        """
        with self._database.read() as session:
            return _require(session, document_id).to_row()

    def list(self, limit: int, after: str | None = None) -> tuple[DocumentRows, bool]:
        """One page of documents, newest first.

        Pages stay disjoint and complete while documents come and go: new ones appear before the
        first page only.

        Args:
            limit: Most rows to return, >= 1.
            after: The last id of the page before; None for the first page.

        Returns:
            The rows, and whether there are more behind them.

        Raises:
            NotFoundError: The document `after` is no longer there; begin at the first page.
        """
        query = select(DocumentRecord).order_by(DocumentRecord.sequence.desc()).limit(limit + 1)
        with self._database.read() as session:
            if after is not None:
                query = query.where(DocumentRecord.sequence < _require(session, after).sequence)
            rows = [record.to_row() for record in session.scalars(query)]
        return rows[:limit], len(rows) > limit

    def delete(self, document_id: str) -> DocumentRow:
        """Remove a document and return what it was.

        Raises:
            NotFoundError: There is none of this id.
        """
        with self._database.write() as session:
            record = _require(session, document_id)
            row = record.to_row()
            session.delete(record)
        return row

    def count_content(self, content_key: str) -> int:
        """How many documents share a content; its text and state may go when it is 0."""
        query = select(func.count()).where(DocumentRecord.content_key == content_key)
        with self._database.read() as session:
            return int(session.scalar(query) or 0)

    def record(self, content_key: str, progress: IngestProgress) -> None:
        """Store the progress of a content in all its documents; unknown contents are ignored.

        Late reports change nothing: "ready" stays until it is queued again, and while a document
        is being ingested its `tokens_done` never falls.
        """
        values = {name: getattr(progress, name) for name in _PROGRESS_COLUMNS}
        query = (
            update(DocumentRecord)
            .where(DocumentRecord.content_key == content_key)
            .where(_may_become(progress))
            .values(values)
            .execution_options(synchronize_session=False)
        )
        with self._database.write() as session:
            session.execute(query)

    def unfinished(self) -> DocumentRows:
        """Documents whose ingestion a restart must take up again, oldest first."""
        query = (
            select(DocumentRecord)
            .where(DocumentRecord.status.in_(("queued", "ingesting")))
            .order_by(DocumentRecord.sequence)
        )
        with self._database.read() as session:
            return [record.to_row() for record in session.scalars(query)]

    def close(self) -> None:
        """Close the database's connections."""
        self._database.close()


_PROGRESS_COLUMNS = tuple(IngestProgress.__dataclass_fields__)


def _set_progress(record: DocumentRecord, progress: IngestProgress) -> None:
    for name in _PROGRESS_COLUMNS:
        setattr(record, name, getattr(progress, name))


def _may_become(progress: IngestProgress) -> ColumnElement[bool]:
    """Which rows a report may still change."""
    status = DocumentRecord.status
    match progress.status:
        case "queued" | "ready":
            return true()
        case "failed":
            return status != "ready"
        case "ingesting":
            return or_(
                status.in_(("queued", "failed")),
                and_(status == "ingesting", DocumentRecord.tokens_done <= progress.tokens_done),
            )


def _find(session: Session, document_id: str) -> DocumentRecord | None:
    query = select(DocumentRecord).where(DocumentRecord.document_id == document_id)
    return session.scalars(query).first()


def _require(session: Session, document_id: str) -> DocumentRecord:
    record = _find(session, document_id)
    if record is None:
        raise NotFoundError(
            f"There is no document {document_id!r}; GET /v1/documents lists what there is.",
            document_id=document_id,
        )
    return record
