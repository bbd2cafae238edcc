import asyncio
from dataclasses import replace

import pytest

SHORT = "abcd"
LONG = "abcdefghijklmnopqrstuvwxyz"
LONG_STEPS = 7


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

    world.check(handle, LONG, mode)
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

    world.check(handle, LONG, "linear")
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

    world.check(handle, LONG, "linear")
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

    world.check(handle, changed, "linear")
    assert [step.start for step in world.worker.steps] == list(range(4, 28, 4))
    world.restart()
    again = await world.ingestor.wait_ready(replace(document, text=changed), timeout_s=5)
    world.check(again, changed, "linear")


async def test_a_changed_full_prefill_limit_prefills_again_in_the_new_mode(world):
    document = world.document(LONG)
    await world.ingestor.wait_ready(document, timeout_s=5)
    await world.ingestor.close()

    world.restart(full_prefill_max_tokens=50)
    handle = await world.ingestor.wait_ready(document, timeout_s=5)

    world.check(handle, LONG, "full")


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
    world.check(handle, LONG, "linear")
    assert not world.worker.steps


async def test_inline_text_becomes_durable_when_it_is_uploaded_afterwards(world):
    await world.ingestor.wait_ready(world.document(LONG, document_id=None), timeout_s=5)
    await world.ingestor.start(world.document(LONG))
    await world.settle()
    await world.ingestor.close()

    world.restart()
    await world.ingestor.wait_ready(world.document(LONG), timeout_s=5)
    assert not world.worker.steps
