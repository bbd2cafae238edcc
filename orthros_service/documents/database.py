"""Opening the catalogue's database: engine, transactions, tables, and errors as ours."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, inspect, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session

from orthros_service.documents.rows import SCHEMA_VERSION, Base, SchemaVersion
from orthros_service.errors import InvalidValueError, UnavailableError

logger = logging.getLogger(__name__)

_BUSY_TIMEOUT_MS = 15_000
_EXAMPLE = "Examples: sqlite:///data/orthros.db, postgresql+psycopg://user:password@host/orthros."


class Database:
    """One database with the catalogue's tables; thread-safe.

    SQLite runs in WAL mode, and a writing transaction takes the write lock at its start, so that
    writers of several processes wait for one another instead of failing half way.

    Args:
        url: SQLAlchemy URL; a relative SQLite path is relative to the working directory, and its
            folder is created.

    Raises:
        InvalidValueError: The URL cannot be used, or the tables are newer than this release.
        UnavailableError: The database cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self._url = _parse_url(url)
        self._name = self._url.render_as_string(hide_password=True)
        try:
            if self._url.get_backend_name() == "sqlite":
                self._engine = _open_sqlite(self._url)
            else:
                self._engine = create_engine(self._url, pool_pre_ping=True)
        except (NoSuchModuleError, ModuleNotFoundError) as error:
            raise InvalidValueError(
                f"The catalogue's database URL {self._name} needs a driver that is not installed: "
                f"{error}. {_EXAMPLE}"
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"The folder of {self._name} cannot be created: {error.strerror}."
            ) from error
        self._is_open = False
        self._create_tables()
        self._is_open = True

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that only reads.

        Raises:
            UnavailableError: The database failed.
        """
        with self._errors_as_ours(), Session(self._engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that commits at its end, or rolls back if the body raises.

        Raises:
            UnavailableError: The database failed, or stayed locked by another writer.
        """
        writer = self._engine.execution_options(is_write=True)
        with self._errors_as_ours(), Session(writer) as session, session.begin():
            yield session

    def close(self) -> None:
        """Close pooled connections."""
        self._engine.dispose()

    @contextmanager
    def _errors_as_ours(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            logger.warning("The catalogue %s failed: %s", self._name, cause)
            if self._is_open:
                # Callers over the network see this: where the database is, is not their business.
                message = "The document catalogue failed; send the request again."
            else:
                message = (
                    f"The document catalogue {self._name} failed: {cause}. Try again; if it goes "
                    "on, see that the database runs, is writable and has space."
                )
            raise UnavailableError(message) from error

    def _create_tables(self) -> None:
        with self.write() as session:
            connection = session.connection()
            # Two processes may start at once; on PostgreSQL nothing else makes the second wait.
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(6877102)")
            version = self._found_version(connection)
            if version is None:
                Base.metadata.create_all(connection)
                session.execute(insert(SchemaVersion).values(version=SCHEMA_VERSION))
            elif version != SCHEMA_VERSION:
                raise InvalidValueError(
                    f"The catalogue {self._name} has tables of version {version}; this release "
                    f"knows version {SCHEMA_VERSION}. Use the release that made them, or another "
                    "database."
                )

    def _found_version(self, connection: Connection) -> int | None:
        if not inspect(connection).has_table(SchemaVersion.__tablename__):
            return None
        return connection.execute(select(SchemaVersion.version)).scalar()


def _parse_url(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise InvalidValueError(
            f"The catalogue's database URL is not an SQLAlchemy URL. {_EXAMPLE}"
        ) from error
    is_memory = parsed.database in {None, "", ":memory:"} or parsed.query.get("mode") == "memory"
    if parsed.get_backend_name() == "sqlite" and is_memory:
        raise InvalidValueError(
            "The catalogue cannot live in memory: several threads and processes share it. "
            f"Name a file. {_EXAMPLE}"
        )
    return parsed


def _open_sqlite(url: URL) -> Engine:
    assert url.database is not None
    Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def _set_up(connection: Any, _record: object) -> None:
        # The driver would begin transactions itself, and too late for a lock at their start.
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout={_BUSY_TIMEOUT_MS}",
            "journal_mode=WAL",
            "foreign_keys=ON",
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        is_write = connection.get_execution_options().get("is_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

    return engine
