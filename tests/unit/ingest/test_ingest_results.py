import asyncio
import logging
import sqlite3
from dataclasses import replace

import numpy as np
import pytest

from orthros_service.errors import (
    DocumentTooLargeError,
    EmptyDocumentError,
    InvalidValueError,
)
from orthros_service.types import TokenizedDocument

SHORT = "abcd"
LONG = "abcdefghijklmnopqrstuvwxyz"
LONG_STEPS = 7


@pytest.mark.parametrize("mode", ["full", "linear"])
@pytest.mark.parametrize("length", [1, 2, 3, 25, 26, 27])
async def test_a_stepped_document_equals_the_reference_in_either_mode(world, mode, length):
    text = LONG[:length] if length <= 26 else LONG + "!"

    handle = await world.ingestor.wait_ready(world.document(text, mode=mode), timeout_s=5)

    world.check(handle, text, mode)


@pytest.mark.parametrize(("text", "mode"), [("abcd", "full"), ("abcde", "linear")])
async def test_auto_chooses_by_the_length_of_the_state_and_says_why(world, caplog, text, mode):
    with caplog.at_level(logging.INFO):
        handle = await world.ingestor.wait_ready(world.document(text), timeout_s=5)

    assert handle.layout.mode == mode
    assert f"{len(text) + 2} tokens, mode {mode}" in caplog.text
    assert "full_prefill_max_tokens=6" in caplog.text
    assert text not in caplog.text


async def test_full_mode_can_be_forced_on_a_long_text(world):
    handle = await world.ingestor.wait_ready(world.document("x" * 98, mode="full"), timeout_s=5)

    assert handle.layout.mode == "full"


async def test_tokens_are_prefilled_as_they_are_without_a_header(world):
    source = TokenizedDocument(
        content_key="cd" * 32,
        token_ids=np.arange(9, dtype=np.int32),
        char_starts=np.zeros(9, np.int64),
        char_ends=np.zeros(9, np.int64),
        mode="linear",
    )

    handle = await world.ingestor.wait_ready(source, timeout_s=5)

    assert np.concatenate([s.token_ids for s in handle.segments]).tolist() == list(range(9))
    assert not world.files("*")


async def test_a_text_over_the_limit_is_refused_with_limit_and_actual(world):
    document = world.document("x" * 99)
    await world.ingestor.start(document)
    with pytest.raises(DocumentTooLargeError) as caught:
        await world.ingestor.wait_ready(document, timeout_s=5)

    assert caught.value.details == {"limit": 100, "actual": 101}
    last = world.recorder.of(document.content_key)[-1]
    assert (last.status, last.error_code) == ("failed", "document_too_large")
    assert not world.worker.steps


async def test_a_text_of_white_space_is_refused(world):
    with pytest.raises(EmptyDocumentError):
        await world.ingestor.wait_ready(world.document(" \n\t"), timeout_s=5)


async def test_a_key_that_is_no_digest_is_refused(world):
    with pytest.raises(InvalidValueError):
        await world.ingestor.wait_ready(
            replace(world.document(SHORT), content_key="../x"), timeout_s=5
        )
    with pytest.raises(InvalidValueError):
        await world.ingestor.forget("../x")


async def test_progress_is_recorded_after_every_step_in_order(world):
    document = world.document(LONG)
    await world.ingestor.start(document)
    await world.ingestor.wait_ready(document, timeout_s=5)

    records = world.recorder.of(document.content_key)
    assert [record.status for record in records] == [
        "queued",
        *["ingesting"] * (LONG_STEPS + 1),
        "ready",
    ]
    assert [record.tokens_done for record in records[1:]] == [0, 4, 8, 12, 16, 20, 24, 28, 28]
    assert {record.num_tokens for record in records[1:]} == {28}
    assert {record.mode for record in records[1:]} == {"linear"}
    assert records[1].tokens_per_s is None
    assert all(record.tokens_per_s > 0 for record in records[2:])


async def test_inline_text_is_neither_recorded_nor_written(world):
    await world.ingestor.wait_ready(world.document(LONG, document_id=None), timeout_s=5)

    assert world.recorder.records == []
    assert not world.files("*")


async def test_a_second_document_of_the_same_content_learns_that_it_is_ready(world):
    await world.ingestor.start(world.document(LONG))
    await world.ingestor.wait_ready(world.document(LONG), timeout_s=5)
    await world.settle()
    world.recorder.records.clear()

    await world.ingestor.start(world.document(LONG, document_id="doc-2"))
    await world.settle()

    assert world.recorder.records[-1][1].status == "ready"
    assert len(world.worker.steps) == LONG_STEPS


async def test_a_ready_content_is_never_reported_as_queued_again(world):
    document = world.document(LONG)
    await world.ingestor.wait_ready(document, timeout_s=5)
    await world.ingestor.close()

    world.restart()
    await world.ingestor.start(replace(document, document_id="doc-2"))
    await world.until(lambda: world.recorder.records)
    await world.settle()

    assert {progress.status for progress in world.recorder.of(document.content_key)} == {"ready"}


async def test_a_document_that_joins_late_learns_how_far_the_job_is(world):
    world.worker.gate = asyncio.Semaphore(3)
    await world.ingestor.start(world.document(LONG))
    await world.until_steps(4)
    world.recorder.records.clear()

    await world.ingestor.start(world.document(LONG, document_id="doc-2"))

    assert [progress.tokens_done for _, progress in world.recorder.records] == [12]


async def test_a_broken_database_does_not_lose_the_prefill(world, caplog):
    world.recorder.error = sqlite3.OperationalError("database is locked")
    await world.ingestor.start(world.document(LONG))

    handle = await world.ingestor.wait_ready(world.document(LONG), timeout_s=5)

    world.check(handle, LONG, "linear")
    assert "progress was not recorded" in caplog.text
