import asyncio

import pytest

from orthros_service.errors import (
    DeadlineExceededError,
    UnavailableError,
)

SHORT = "abcd"
LONG = "abcdefghijklmnopqrstuvwxyz"
LONG_STEPS = 7


async def test_a_deadline_ends_the_wait_but_not_a_documents_ingestion(world):
    world.worker.gate = asyncio.Semaphore(0)
    document = world.document(LONG)
    with pytest.raises(DeadlineExceededError) as caught:
        await world.ingestor.wait_ready(document, timeout_s=0.05)
    assert caught.value.phase == "prefill"

    world.worker.gate = None
    handle = await world.ingestor.wait_ready(document, timeout_s=5)
    world.check(handle, LONG, "linear")


async def test_inline_ingestion_stops_when_its_last_waiter_leaves(world):
    world.worker.gate = asyncio.Semaphore(0)
    source = world.document(LONG, document_id=None)
    first = asyncio.create_task(world.ingestor.wait_ready(source, timeout_s=5))
    second = asyncio.create_task(world.ingestor.wait_ready(source, timeout_s=5))
    await world.settle()
    first.cancel()
    await world.settle()
    assert world.worker.num_cancelled == 0
    second.cancel()
    await world.settle()
    assert world.worker.num_cancelled == 1
    assert world.worker.num_running == 0

    world.worker.gate = None
    handle = await world.ingestor.wait_ready(source, timeout_s=5)
    world.check(handle, LONG, "linear")


async def test_forgetting_stops_the_work_fails_the_waiters_and_deletes_everything(world):
    world.worker.gate = asyncio.Semaphore(2)
    document = world.document(LONG)
    waiting = asyncio.create_task(world.ingestor.wait_ready(document, timeout_s=5))
    await world.until_steps(3)

    await world.ingestor.forget(document.content_key)

    with pytest.raises(UnavailableError):
        await waiting
    assert world.worker.num_cancelled == 1
    assert not world.files()
    num_records = len(world.recorder.records)
    await world.settle()
    assert len(world.recorder.records) == num_records


async def test_a_job_that_is_forgotten_before_it_began_still_answers(world):
    document = world.document(LONG)
    waiting = asyncio.create_task(world.ingestor.wait_ready(document, timeout_s=5))
    await asyncio.sleep(0)
    await world.ingestor.forget(document.content_key)

    with pytest.raises(UnavailableError):
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

    world.check(handle, LONG, "linear")
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
    await world.settle()
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


async def test_a_caller_that_polls_keeps_its_text_and_one_that_stops_polling_loses_it(world):
    world.worker.gate = asyncio.Semaphore(0)
    source = world.document(LONG, document_id=None)
    assert await world.ingestor.poll(source, timeout_s=0.02, grace_s=0.5) is None
    assert await world.ingestor.poll(source, timeout_s=0.02, grace_s=0.05) is None
    assert (world.worker.num_cancelled, world.ingestor.num_running) == (0, 1)
    assert world.ingestor.num_pending_tokens > 0
    await asyncio.sleep(0.1)
    assert (world.worker.num_cancelled, world.ingestor.num_running) == (1, 0)
    assert world.ingestor.num_pending_tokens == 0


async def test_a_poll_that_is_cancelled_leaves_at_once(world):
    world.worker.gate = asyncio.Semaphore(0)
    source = world.document(LONG, document_id=None)
    assert await world.ingestor.poll(source, timeout_s=0.05, grace_s=60) is None
    polling = asyncio.create_task(world.ingestor.poll(source, timeout_s=5, grace_s=60))
    await world.settle()
    polling.cancel()
    await world.settle()
    assert world.worker.num_cancelled == 1


async def test_a_deleted_document_has_no_pending_tokens(world):
    world.worker.gate = asyncio.Semaphore(2)
    document = world.document(LONG)
    await world.ingestor.start(document)
    await world.until_steps(3)
    assert world.ingestor.num_pending_tokens > 0
    await world.ingestor.forget(document.content_key)
    assert (world.ingestor.num_running, world.ingestor.num_pending_tokens) == (0, 0)
