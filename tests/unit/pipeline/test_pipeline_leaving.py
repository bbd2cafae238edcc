import asyncio
from contextlib import aclosing

import pytest

from orthros_service.engine.types import DecodeDelta
from orthros_service.errors import (
    CancelledError,
    DeadlineExceededError,
    UnavailableError,
)


async def test_all_documents_share_what_is_left_of_the_deadline(world):
    await world.collect(world.request("a", "b", deadline_s=3.0))

    assert all(2 < timeout_s <= 3 for timeout_s in world.coordinator.timeouts)


async def test_a_deadline_during_prefill_names_the_phase_and_ends_the_waits(world):
    world.coordinator.gates[world.document("slow").content_key] = asyncio.Event()
    with pytest.raises(DeadlineExceededError) as caught:
        await world.collect(world.request("slow", deadline_s=0.05))
    await asyncio.sleep(0)

    assert caught.value.phase == "prefill"
    assert world.coordinator.num_cancelled == 1


async def test_a_deadline_during_decoding_names_the_phase_and_frees_the_sequence(world):
    world.decoder.gate = asyncio.Event()
    with pytest.raises(DeadlineExceededError) as caught:
        await world.collect(world.request("text", deadline_s=0.05))

    assert caught.value.phase == "decode"
    assert len(world.events) == 1
    assert world.decoder.num_closed == 1
    assert world.decoder.cancelled == ["r1"]


async def test_closing_the_stream_frees_the_sequence(world):
    world.decoder.gate = asyncio.Event()
    async with aclosing(world.pipeline.generate(world.request("text"))) as events:
        await anext(events)

    assert world.decoder.num_closed == 1
    assert world.decoder.cancelled == ["r1"]


async def test_cancelling_the_reading_task_frees_the_sequence(world):
    world.decoder.gate = asyncio.Event()
    task = asyncio.create_task(world.collect(world.request("text")))
    await world.until(lambda: world.decoder.works)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert world.decoder.num_closed == 1
    assert world.decoder.cancelled == ["r1"]


async def test_cancelling_the_reading_task_during_prefill_ends_the_wait(world):
    world.coordinator.gates[world.document("slow").content_key] = asyncio.Event()
    task = asyncio.create_task(world.collect(world.request("slow")))
    await world.until(lambda: world.coordinator.sources)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)

    assert world.coordinator.num_cancelled == 1


async def test_revoking_during_prefill_ends_the_request_with_an_error(world):
    world.coordinator.gates[world.document("slow").content_key] = asyncio.Event()
    task = asyncio.create_task(world.collect(world.request("slow")))
    await world.until(lambda: world.coordinator.sources)
    await world.pipeline.cancel("r1")

    with pytest.raises(CancelledError) as caught:
        await task
    assert caught.value.phase == "prefill"
    assert world.decoder.works == []


async def test_revoking_during_decoding_reaches_the_worker(world):
    async def revoked(work):
        yield DecodeDelta(text="y", num_tokens=1)
        await world.until(lambda: world.decoder.cancelled)
        raise CancelledError("cancelled", phase="decode")

    world.decoder.scripts = [revoked]
    task = asyncio.create_task(world.collect(world.request("text")))
    await world.until(lambda: world.decoder.works)
    await world.pipeline.cancel("r1")

    with pytest.raises(CancelledError):
        await task


async def test_unknown_ids_are_passed_on_to_the_workers(world):
    await world.pipeline.cancel("of another gateway")

    assert world.decoder.cancelled == ["of another gateway"]


async def test_a_worker_that_cannot_confirm_a_cancellation_does_not_hide_the_error(world, caplog):
    world.decoder.gate = asyncio.Event()
    world.decoder.cancel_error = UnavailableError("replica died")
    with pytest.raises(DeadlineExceededError):
        await world.collect(world.request("text", deadline_s=0.05))

    assert "may still be decoding" in caplog.text
