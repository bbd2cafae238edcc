import sqlite3
import subprocess
import sys
import threading

import pytest
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from orthros_service.documents import DocumentCatalog
from orthros_service.documents.rows import Base
from orthros_service.errors import InvalidValueError, UnavailableError
from orthros_service.types import IngestProgress


def add(catalog, document_id, content_key="k" * 64, **values):
    defaults = {
        "title": "Log",
        "content_key": content_key,
        "num_chars": 10,
        "num_bytes": 12,
        "mode_choice": "auto",
    }
    return catalog.create(document_id, **(defaults | values))


def progress(status, tokens_done=0, **values):
    defaults = {"mode": "full", "num_tokens": 100, "tokens_per_s": 5.0}
    return IngestProgress(status=status, tokens_done=tokens_done, **(defaults | values))


def test_sqlite_runs_in_wal_mode_with_foreign_keys(catalog):
    with catalog._database.read() as session:
        connection = session.connection()
        values = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "busy_timeout")
        }
    assert values == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 15_000}


WRITER = """
import sys
from orthros_service.documents import DocumentCatalog
from orthros_service.types import IngestProgress

url, name, num_documents = sys.argv[1], sys.argv[2], int(sys.argv[3])
catalog = DocumentCatalog(url)
for number in range(num_documents):
    catalog.create(
        f"{name}_{number}", title="t", content_key="k" * 64, num_chars=1, num_bytes=1,
        mode_choice="auto",
    )
    catalog.record(
        "k" * 64,
        IngestProgress(
            status="ingesting", mode="linear", num_tokens=9, tokens_done=0, tokens_per_s=None
        ),
    )
    assert catalog.get(f"{name}_{number}").status == "ingesting"
"""


def test_processes_write_at_the_same_time_without_losing_a_row(url):
    num_documents = 60
    # All begin on a database that does not exist yet, so its creation is a race too.
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, url, name, str(num_documents)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b", "c")
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    catalog = DocumentCatalog(url)
    assert catalog.count_content("k" * 64) == 3 * num_documents
    assert {row.status for row in catalog.list(1000)[0]} == {"ingesting"}
    catalog.close()


def test_threads_share_one_catalog(catalog):
    failures = []

    def work(name):
        try:
            for number in range(25):
                add(catalog, f"{name}_{number}")
                catalog.list(5)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert catalog.count_content("k" * 64) == 100


def test_a_failed_write_leaves_the_catalogue_as_it_was(catalog):
    def fail():
        with catalog._database.write() as session:
            session.connection().exec_driver_sql("DELETE FROM orthros_schema")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    add(catalog, "a")
    with catalog._database.read() as session:
        count = session.connection().exec_driver_sql("SELECT count(*) FROM orthros_schema")
        assert count.scalar() == 1


@pytest.mark.parametrize("version", [0, 2, 99])
def test_tables_of_another_version_are_refused(catalog, url, tmp_path, version):
    catalog.close()
    with sqlite3.connect(tmp_path / "data" / "orthros.db") as connection:
        connection.execute("UPDATE orthros_schema SET version = ?", (version,))
    connection.close()
    with pytest.raises(InvalidValueError, match=f"tables of version {version}; this release knows"):
        DocumentCatalog(url)


def test_a_database_that_stays_locked_is_unavailable_and_only_the_log_says_which(
    catalog, tmp_path, caplog
):
    with catalog._database.read() as session:
        session.connection().exec_driver_sql("PRAGMA busy_timeout=50")
    other = sqlite3.connect(tmp_path / "data" / "orthros.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UnavailableError, match="catalogue failed; send") as caught:
        add(catalog, "a")
    assert caught.value.is_retryable
    assert "sqlite" not in caught.value.message
    assert str(tmp_path) in caplog.text
    assert "database is locked" in caplog.text
    other.execute("ROLLBACK")
    other.close()
    add(catalog, "a")


def test_a_file_that_is_no_database_is_unavailable(tmp_path):
    (tmp_path / "x.db").write_text("not a database at all, only some text " * 100)
    with pytest.raises(UnavailableError, match="not a database"):
        DocumentCatalog(f"sqlite:///{tmp_path}/x.db")


def test_a_folder_that_cannot_be_made_is_unavailable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="cannot be created"):
        DocumentCatalog(f"sqlite:///{tmp_path}/file/data/x.db")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "not an SQLAlchemy URL"),
        ("data/orthros.db", "not an SQLAlchemy URL"),
        ("nosuch://host/db", "driver that is not installed"),
        ("sqlite://", "cannot live in memory"),
        ("sqlite:///:memory:", "cannot live in memory"),
        ("sqlite:///file:x?mode=memory&uri=true", "cannot live in memory"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_examples(url, message):
    with pytest.raises(InvalidValueError, match=message) as caught:
        DocumentCatalog(url)
    assert "sqlite:///data/orthros.db" in caught.value.message


def test_a_password_never_shows_in_an_error():
    with pytest.raises(InvalidValueError) as caught:
        DocumentCatalog("nosuch://keeper:secret@host/db")
    assert "secret" not in caught.value.message
    assert "keeper:***@host" in caught.value.message


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    DocumentCatalog("sqlite:///data/orthros.db").close()
    assert (tmp_path / "data" / "orthros.db").exists()


def test_the_tables_can_be_made_in_postgresql():
    statements = [
        str(CreateTable(table).compile(dialect=postgresql.dialect()))
        for table in Base.metadata.sorted_tables
    ]
    documents = next(text for text in statements if "CREATE TABLE documents" in text)
    assert "sequence BIGSERIAL" in documents
    assert "created_at TIMESTAMP WITH TIME ZONE" in documents
    assert "metadata JSON" in documents
