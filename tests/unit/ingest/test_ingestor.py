import asyncio
import logging
import sqlite3
from dataclasses import replace

import numpy as np
import pytest

from orthros_service.errors import (
    CancelledError,
    DeadlineExceededError,
    DocumentTooLargeError,
    EmptyDocumentError,
    EngineError,
    InvalidValueError,
    StateMismatchError,
    UnavailableError,
)
from orthros_service.state.types import StateHandle, TokenizedDocument

SHORT = "abcd"
LONG = "abcdefghijklmnopqrstuvwxyz"
LONG_STEPS = 7


def keys_of(handle: StateHandle) -> list[np.ndarray]:
    return [segment.kv for segment in handle.segments]


def assert_equals_reference(world, handle: StateHandle, text: str, mode: str) -> None:
    assert handle.layout == replace(world.layout, mode=mode)
    assert handle.num_tokens == len(text) + 2
    assert handle.num_bytes == sum(kv.nbytes for kv in keys_of(handle))
    expected = world.reference(text, mode)
    assert len(expected) == len(handle.segments)
    for left, right in zip(keys_of(handle), expected, strict=True):
        assert np.array_equal(left, right)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


# What comes out


@pytest.mark.parametrize("mode", ["full", "linear"])
@pytest.mark.parametrize("length", [1, 2, 3, 25, 26, 27])
async def test_a_stepped_document_equals_the_reference_in_either_mode(world, mode, length):
    text = LONG[:length] if length <= 26 else LONG + "!"

    handle = await world.ingestor.wait_ready(world.document(text, mode=mode), timeout_s=5)

    assert_equals_reference(world, handle, text, mode)


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


# Progress


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
    await settle()
    world.recorder.records.clear()

    await world.ingestor.start(world.document(LONG, document_id="doc-2"))
    await settle()

    assert world.recorder.records[-1][1].status == "ready"
    assert len(world.worker.steps) == LONG_STEPS


async def test_a_ready_content_is_never_reported_as_queued_again(world):
    document = world.document(LONG)
    await world.ingestor.wait_ready(document, timeout_s=5)
    await world.ingestor.close()

    world.restart()
    await world.ingestor.start(replace(document, document_id="doc-2"))
    await world.until(lambda: world.recorder.records)
    await settle()

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

    assert_equals_reference(world, handle, LONG, "linear")
    assert "progress was not recorded" in caplog.text


# One job per content


async def test_many_callers_share_one_ingestion_and_one_state(world):
    document = world.document(LONG)
    await asyncio.gather(*(world.ingestor.start(document) for _ in range(5)))
    handles = await asyncio.gather(
        *(world.ingestor.wait_ready(document, timeout_s=5) for _ in range(20))
    )

    assert len(world.worker.steps) == LONG_STEPS
    assert world.format.num_calls == 1
    assert all(handle is handles[0] for handle in handles)


async def test_a_ready_state_is_handed_out_without_work(world):
    document = world.document(LONG)
    first = await world.ingestor.wait_ready(document, timeout_s=5)
    await settle()
    second = await world.ingestor.wait_ready(document, timeout_s=0)

    assert second is first
    assert world.format.num_calls == 1


async def test_every_waiter_gets_the_same_error(world):
    def fail(step):
        raise StateMismatchError("wrong model")

    world.worker.before_step = fail
    document = world.document(LONG)
    results = await asyncio.gather(
        *(world.ingestor.wait_ready(document, timeout_s=5) for _ in range(4)),
        return_exceptions=True,
    )

    assert isinstance(results[0], StateMismatchError)
    assert all(result is results[0] for result in results)
    assert len(world.worker.steps) == 1


async def test_a_failed_document_can_be_tried_again(world):
    def fail(step):
        raise StateMismatchError("wrong model")

    world.worker.before_step = fail
    document = world.document(LONG)
    with pytest.raises(StateMismatchError):
        await world.ingestor.wait_ready(document, timeout_s=5)
    await settle()
    assert world.recorder.of(document.content_key)[-1].error_message == "wrong model"
    world.worker.before_step = lambda step: None

    handle = await world.ingestor.wait_ready(document, timeout_s=5)

    assert_equals_reference(world, handle, LONG, "linear")
    assert world.recorder.of(document.content_key)[-1].status == "ready"


# Steps that fail


@pytest.mark.parametrize("failing_step", range(LONG_STEPS))
async def test_a_step_that_fails_twice_is_retried_with_the_same_context(world, failing_step):
    failures = []

    def fail_twice(step):
        if step.start == 4 * failing_step and len(failures) < 2:
            failures.append(step)
            raise UnavailableError("replica died")

    world.worker.before_step = fail_twice
    handle = await world.ingestor.wait_ready(world.document(LONG), timeout_s=5)

    assert_equals_reference(world, handle, LONG, "linear")
    assert len(world.worker.steps) == LONG_STEPS + 2


async def test_retries_end(world):
    def fail(step):
        raise UnavailableError("replica died")

    world.worker.before_step = fail
    with pytest.raises(UnavailableError):
        await world.ingestor.wait_ready(world.document(LONG), timeout_s=5)

    assert len(world.worker.steps) == 3


async def test_a_step_that_hangs_is_cancelled_and_retried(world):
    world.worker.hang_once_at = {0, 8}

    handle = await world.ingestor.wait_ready(world.document(LONG), timeout_s=5)

    assert_equals_reference(world, handle, LONG, "linear")
    assert world.worker.num_cancelled == 2
    assert len(world.worker.steps) == LONG_STEPS + 2


async def test_a_step_that_always_hangs_ends_as_unavailable(world):
    world.worker.gate = asyncio.Semaphore(0)
    with pytest.raises(UnavailableError, match=r"0\.2 s"):
        await world.ingestor.wait_ready(world.document(SHORT), timeout_s=5)


async def test_an_unforeseen_error_reaches_the_waiter_as_an_engine_error(world):
    def fail(step):
        raise ZeroDivisionError("a secret of the text")

    world.worker.before_step = fail
    document = world.document(LONG)
    with pytest.raises(EngineError, match="ZeroDivisionError") as caught:
        await world.ingestor.wait_ready(document, timeout_s=5)

    assert "secret" not in caught.value.message
    await settle()
    assert world.recorder.of(document.content_key)[-1].error_code == "engine_error"


# Crashes and restarts


@pytest.mark.parametrize("num_done", range(LONG_STEPS))
@pytest.mark.parametrize("mode", ["full", "linear"])
async def test_an_ingestion_resumes_at_the_last_written_segment(world, num_done, mode):
    document = world.document(LONG, mode=mode)
    world.worker.gate = asyncio.Semaphore(num_done)
    await world.ingestor.start(document)
    await world.until_steps(num_done + 1)
    await world.ingestor.close()

    world.restart()
    handle = await world.ingestor.wait_ready(document, timeout_s=5)

    assert_equals_reference(world, handle, LONG, mode)
    assert [step.start for step in world.worker.steps] == list(range(4 * num_done, 28, 4))
    progress = world.recorder.of(document.content_key)
    assert progress[0].status == "queued"
    assert progress[1].tokens_done == 4 * num_done


async def test_a_ready_document_needs_neither_tokens_nor_steps_after_a_restart(world):
    document = world.document(LONG)
    await world.ingestor.wait_ready(document, timeout_s=5)
    await world.ingestor.close()

    world.restart()
    handle = await world.ingestor.wait_ready(document, timeout_s=5)

    assert_equals_reference(world, handle, LONG, "linear")
    assert not world.worker.steps
    assert world.format.num_calls == 0


@pytest.mark.parametrize("index", range(LONG_STEPS))
async def test_a_damaged_file_is_prefilled_again_from_there(world, index):
    document = world.document(LONG)
    await world.ingestor.wait_ready(document, timeout_s=5)
    await world.ingestor.close()
    path = world.files()[index]
    path.write_bytes(path.read_bytes()[:-30])

    world.restart()
    handle = await world.ingestor.wait_ready(document, timeout_s=5)

    assert_equals_reference(world, handle, LONG, "linear")
    assert [step.start for step in world.worker.steps] == list(range(4 * index, 28, 4))


async def test_stored_segments_with_other_tokens_are_replaced(world):
    document = world.document(LONG)
    world.worker.gate = asyncio.Semaphore(3)
    await world.ingestor.start(document)
    await world.until_steps(4)
    await world.ingestor.close()

    world.restart()
    changed = LONG[:5] + "#" + LONG[6:]
    handle = await world.ingestor.wait_ready(replace(document, text=changed), timeout_s=5)

    assert_equals_reference(world, handle, changed, "linear")
    assert [step.start for step in world.worker.steps] == list(range(4, 28, 4))
    world.restart()
    again = await world.ingestor.wait_ready(replace(document, text=changed), timeout_s=5)
    assert_equals_reference(world, again, changed, "linear")


async def test_a_changed_full_prefill_limit_prefills_again_in_the_new_mode(world):
    document = world.document(LONG)
    await world.ingestor.wait_ready(document, timeout_s=5)
    await world.ingestor.close()

    world.restart(full_prefill_max_tokens=50)
    handle = await world.ingestor.wait_ready(document, timeout_s=5)

    assert_equals_reference(world, handle, LONG, "full")


async def test_inline_text_becomes_durable_when_it_is_uploaded_during_its_ingestion(world):
    world.worker.gate = asyncio.Semaphore(3)
    waiting = asyncio.create_task(
        world.ingestor.wait_ready(world.document(LONG, document_id=None), timeout_s=5)
    )
    await world.until_steps(4)
    await world.ingestor.start(world.document(LONG))
    world.worker.gate = None
    await waiting
    await world.ingestor.close()

    world.restart()
    handle = await world.ingestor.wait_ready(world.document(LONG), timeout_s=5)
    assert_equals_reference(world, handle, LONG, "linear")
    assert not world.worker.steps


async def test_inline_text_becomes_durable_when_it_is_uploaded_afterwards(world):
    await world.ingestor.wait_ready(world.document(LONG, document_id=None), timeout_s=5)
    await world.ingestor.start(world.document(LONG))
    await settle()
    await world.ingestor.close()

    world.restart()
    await world.ingestor.wait_ready(world.document(LONG), timeout_s=5)
    assert not world.worker.steps


# Leaving, deleting, closing


async def test_a_deadline_ends_the_wait_but_not_a_documents_ingestion(world):
    world.worker.gate = asyncio.Semaphore(0)
    document = world.document(LONG)
    with pytest.raises(DeadlineExceededError) as caught:
        await world.ingestor.wait_ready(document, timeout_s=0.05)
    assert caught.value.phase == "prefill"

    world.worker.gate = None
    handle = await world.ingestor.wait_ready(document, timeout_s=5)
    assert_equals_reference(world, handle, LONG, "linear")


async def test_inline_ingestion_stops_when_its_last_waiter_leaves(world):
    world.worker.gate = asyncio.Semaphore(0)
    source = world.document(LONG, document_id=None)
    first = asyncio.create_task(world.ingestor.wait_ready(source, timeout_s=5))
    second = asyncio.create_task(world.ingestor.wait_ready(source, timeout_s=5))
    await settle()
    first.cancel()
    await settle()
    assert world.worker.num_cancelled == 0
    second.cancel()
    await settle()
    assert world.worker.num_cancelled == 1
    assert world.worker.num_running == 0

    world.worker.gate = None
    handle = await world.ingestor.wait_ready(source, timeout_s=5)
    assert_equals_reference(world, handle, LONG, "linear")


async def test_forgetting_stops_the_work_fails_the_waiters_and_deletes_everything(world):
    world.worker.gate = asyncio.Semaphore(2)
    document = world.document(LONG)
    waiting = asyncio.create_task(world.ingestor.wait_ready(document, timeout_s=5))
    await world.until_steps(3)

    await world.ingestor.forget(document.content_key)

    with pytest.raises(CancelledError):
        await waiting
    assert world.worker.num_cancelled == 1
    assert not world.files()
    num_records = len(world.recorder.records)
    await settle()
    assert len(world.recorder.records) == num_records


async def test_a_job_that_is_forgotten_before_it_began_still_answers(world):
    document = world.document(LONG)
    waiting = asyncio.create_task(world.ingestor.wait_ready(document, timeout_s=5))
    await asyncio.sleep(0)
    await world.ingestor.forget(document.content_key)

    with pytest.raises(CancelledError):
        await waiting
    assert not world.worker.steps


async def test_a_document_that_is_deleted_and_sent_again_at_once_becomes_ready(world):
    document = world.document(LONG)
    await world.ingestor.wait_ready(document, timeout_s=5)

    _, _, handle = await asyncio.gather(
        world.ingestor.forget(document.content_key),
        world.ingestor.start(document),
        world.ingestor.wait_ready(document, timeout_s=5),
    )
    await world.ingestor.close()

    assert_equals_reference(world, handle, LONG, "linear")
    world.restart()
    await world.ingestor.wait_ready(document, timeout_s=5)
    assert not world.worker.steps


async def test_forgetting_an_unknown_document_is_fine(world):
    await world.ingestor.forget("ab" * 32)


async def test_closing_answers_every_waiter_and_refuses_new_work(world):
    world.worker.gate = asyncio.Semaphore(0)
    waiting = [
        asyncio.create_task(world.ingestor.wait_ready(world.document(LONG[n:]), timeout_s=5))
        for n in range(3)
    ]
    await settle()
    assert await world.ingestor.is_ready()
    await world.ingestor.close()

    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, UnavailableError) for result in results)
    assert not await world.ingestor.is_ready()
    with pytest.raises(UnavailableError):
        await world.ingestor.start(world.document(SHORT))


async def test_readiness_needs_a_worker(world):
    world.worker.is_answering = False
    assert not await world.ingestor.is_ready()


# Fairness


async def test_a_short_document_waits_for_one_step_of_a_long_one_at_most(world):
    world.worker.gate = asyncio.Semaphore(1)
    long = asyncio.create_task(
        world.ingestor.wait_ready(world.document("x" * 90, document_id=None), timeout_s=5)
    )
    await world.until_steps(2)
    short = asyncio.create_task(
        world.ingestor.wait_ready(world.document(SHORT, document_id=None), timeout_s=5)
    )
    await settle()
    world.worker.gate.release()
    await world.until_steps(3)

    assert [step.layout.mode for step in world.worker.steps] == ["linear", "linear", "full"]
    for _ in range(50):
        world.worker.gate.release()
    await asyncio.gather(long, short)


async def test_documents_take_turns_step_by_step(world):
    world.worker.step_s = 0.002
    sources = [world.document(letter * 98, document_id=None) for letter in "abc"]
    await asyncio.gather(*(world.ingestor.wait_ready(source, timeout_s=5) for source in sources))

    order = [chr(step.token_ids[-1]) for step in world.worker.steps]
    assert len(order) == 75
    all_are_there = max(order.index(letter) for letter in "abc")
    one_is_done = min(74 - order[::-1].index(letter) for letter in "abc")
    assert one_is_done - all_are_there > 10
    for start in range(all_are_there, one_is_done - 2):
        assert len(set(order[start : start + 3])) == 3


@pytest.mark.parametrize("num_workers", [1, 2, 3])
async def test_as_many_steps_run_at_once_as_there_are_workers(world, num_workers):
    world.restart(num_workers=num_workers)
    texts = [letter * 30 for letter in "abcde"]
    await asyncio.gather(
        *(world.ingestor.wait_ready(world.document(text), timeout_s=5) for text in texts)
    )

    assert world.worker.most_running == num_workers
