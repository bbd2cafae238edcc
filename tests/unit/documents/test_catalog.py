import pickle
from datetime import UTC, datetime, timedelta

import pytest

from orthros_service.documents import DocumentCatalog
from orthros_service.errors import InvalidValueError, NotFoundError
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


def test_a_created_document_is_queued_and_read_back_whole(catalog):
    before = datetime.now(UTC)
    row = add(
        catalog,
        "doc_1",
        title="Tür 😀",
        num_chars=2**33,
        mode_choice="linear",
        metadata={"shelf": 3, "tags": ["a", None], "deep": {"é": True}},
    )
    assert row == catalog.get("doc_1")
    assert (row.document_id, row.title, row.num_chars, row.num_bytes) == (
        "doc_1",
        "Tür 😀",
        2**33,
        12,
    )
    assert (row.status, row.mode_choice, row.mode) == ("queued", "linear", None)
    assert (row.num_tokens, row.tokens_done, row.tokens_per_s) == (None, 0, None)
    assert row.metadata == {"shelf": 3, "tags": ["a", None], "deep": {"é": True}}
    assert row.created_at.utcoffset() == timedelta(0)
    assert before <= row.created_at <= datetime.now(UTC)
    assert pickle.loads(pickle.dumps(row)) == row


def test_a_row_holds_its_progress(catalog):
    add(catalog, "a")
    report = progress("failed", 3, error_code="engine_error", error_message="It broke.")
    catalog.record("k" * 64, report)
    assert catalog.get("a").progress == report


def test_an_id_is_taken_once(catalog):
    add(catalog, "a")
    with pytest.raises(InvalidValueError, match="'a' is taken"):
        add(catalog, "a")
    assert catalog.count_content("k" * 64) == 1


def test_unknown_ids_are_not_found(catalog):
    for call in (catalog.get, catalog.delete, lambda id_: catalog.list(10, after=id_)):
        with pytest.raises(NotFoundError, match="no document 'x'") as caught:
            call("x")
        assert caught.value.details == {"document_id": "x"}


def test_documents_are_listed_newest_first_in_disjoint_pages(catalog):
    ids = [f"doc_{number}" for number in range(7)]
    for document_id in ids:
        add(catalog, document_id)
    rows, has_more = catalog.list(3)
    seen = [row.document_id for row in rows]
    assert has_more
    # Neither a new document nor the deletion of a seen one moves the pages behind.
    add(catalog, "newer")
    catalog.delete(seen[0])
    while has_more:
        rows, has_more = catalog.list(3, after=seen[-1])
        seen += [row.document_id for row in rows]
    assert seen == ids[::-1]


def test_a_page_that_ends_exactly_at_the_end_has_no_more(catalog):
    assert catalog.list(5) == ([], False)
    add(catalog, "a")
    add(catalog, "b")
    rows, has_more = catalog.list(2)
    assert ([row.document_id for row in rows], has_more) == (["b", "a"], False)
    assert catalog.list(5, after="a") == ([], False)


def test_a_new_document_is_listed_first_after_the_newest_was_deleted(catalog):
    add(catalog, "a")
    add(catalog, "b")
    catalog.delete("b")
    add(catalog, "c")
    assert [row.document_id for row in catalog.list(9)[0]] == ["c", "a"]


def test_delete_returns_what_the_document_was(catalog):
    row = add(catalog, "a")
    assert catalog.delete("a") == row
    with pytest.raises(NotFoundError):
        catalog.get("a")


def test_progress_reaches_all_documents_of_a_content_and_no_other(catalog):
    for document_id, key in (("a", "1" * 64), ("b", "1" * 64), ("c", "2" * 64)):
        add(catalog, document_id, key)
    catalog.record("1" * 64, progress("ingesting", 40))
    catalog.record("3" * 64, progress("ready", 100))
    done = [catalog.get(document_id).tokens_done for document_id in "abc"]
    assert done == [40, 40, 0]
    assert [catalog.count_content(digit * 64) for digit in "123"] == [2, 1, 0]


@pytest.mark.parametrize(
    ("first", "second", "is_taken"),
    [
        (progress("queued"), progress("ingesting", 10), True),
        (progress("ingesting", 10), progress("ingesting", 20), True),
        (progress("ingesting", 20), progress("ingesting", 10), False),
        (progress("ingesting", 20), progress("ready", 100), True),
        (progress("ingesting", 20), progress("failed", 20), True),
        (progress("ingesting", 20), progress("queued"), True),
        (progress("ready", 100), progress("ingesting", 40), False),
        (progress("ready", 100), progress("ingesting", 100), False),
        (progress("ready", 100), progress("failed", 40), False),
        (progress("ready", 100), progress("queued"), True),
        (progress("failed", 20), progress("ingesting", 5), True),
        (progress("failed", 20), progress("ready", 100), True),
    ],
)
def test_late_reports_change_nothing_until_the_content_is_queued_again(
    catalog, first, second, is_taken
):
    add(catalog, "a")
    catalog.record("k" * 64, first)
    catalog.record("k" * 64, second)
    assert catalog.get("a").progress == (second if is_taken else first)


def test_a_content_that_was_queued_again_is_ingested_again(catalog):
    add(catalog, "a")
    for report in (progress("ready", 100), progress("queued"), progress("ingesting", 7)):
        catalog.record("k" * 64, report)
    assert catalog.get("a").progress == progress("ingesting", 7)


@pytest.mark.parametrize("status", ["ingesting", "ready"])
def test_a_document_of_known_content_starts_where_its_ingestion_stands(catalog, status):
    add(catalog, "a")
    catalog.record("k" * 64, progress(status, 50))
    assert add(catalog, "b").progress == progress(status, 50)
    assert add(catalog, "c", "2" * 64).status == "queued"


def test_a_document_whose_content_failed_is_queued(catalog):
    add(catalog, "a")
    catalog.record("k" * 64, progress("failed", 50))
    assert add(catalog, "b").status == "queued"


def test_unfinished_documents_survive_a_restart_oldest_first(catalog, url):
    for number, status in enumerate(["ready", "ingesting", "failed", "queued"]):
        add(catalog, status, str(number) * 64)
        catalog.record(str(number) * 64, progress(status))
    catalog.close()
    reopened = DocumentCatalog(url)
    assert [row.document_id for row in reopened.unfinished()] == ["ingesting", "queued"]
    reopened.close()
