import asyncio
import threading
from contextlib import aclosing

import pytest

from orthros_service.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineError,
    UnavailableError,
)


async def read_to_end(generator) -> None:
    async with aclosing(generator):
        async for _ in generator:
            pass


@pytest.mark.parametrize("how", ["close", "cancel task", "revoke"])
async def test_a_request_that_is_left_frees_its_sequence_before_the_next_step(
    engine, make_worker, make_work, how, collect, until
):
    engine.permits = threading.Semaphore(2)
    worker = make_worker()
    other = asyncio.create_task(collect(worker, make_work("other", max_tokens=6)))
    generator = worker.generate(make_work("left", max_tokens=1000))
    await anext(generator)
    await until(lambda: len(engine.batches) == 3)

    if how == "close":
        await generator.aclose()
    else:
        reading = asyncio.create_task(read_to_end(generator))
        await asyncio.sleep(0.01)
        if how == "revoke":
            await worker.cancel("left")
        else:
            reading.cancel()
        with pytest.raises((CancelledError, asyncio.CancelledError)):
            await reading
    engine.permits.release(100)
    outputs = await other

    assert "left" in engine.batches[2]
    assert all("left" not in batch for batch in engine.batches[3:])
    assert engine.cancelled == ["left"]
    assert outputs[-1].text == "abcdef"


async def test_a_request_that_is_left_in_the_queue_never_starts(
    engine, make_worker, make_work, collect, until
):
    engine.permits = threading.Semaphore(0)
    worker = make_worker(max_sequences=1)
    first = asyncio.create_task(collect(worker, make_work("r1")))
    await until(lambda: engine.batches)
    second = asyncio.create_task(collect(worker, make_work("r2")))
    await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    engine.permits.release(100)
    await first

    assert "r2" not in engine.works


async def test_cancelling_an_unknown_request_is_ignored(make_worker):
    await make_worker().cancel("nobody")


async def test_an_id_can_be_used_again_right_after_it_was_left(
    engine, make_worker, make_work, collect, until
):
    engine.permits = threading.Semaphore(1)
    worker = make_worker()
    generator = worker.generate(make_work("r1", max_tokens=1000))
    await anext(generator)
    await until(lambda: len(engine.batches) == 2)
    await generator.aclose()
    again = asyncio.create_task(collect(worker, make_work("r1", max_tokens=3)))
    await asyncio.sleep(0.01)
    engine.permits.release(100)

    assert (await again)[-1].text == "abc"


async def test_an_id_that_is_running_is_refused_and_the_first_goes_on(
    engine, make_worker, make_work, collect, until
):
    engine.permits = threading.Semaphore(0)
    worker = make_worker()
    first = asyncio.create_task(collect(worker, make_work("r1")))
    await until(lambda: engine.batches)
    with pytest.raises(EngineError, match="r1"):
        await collect(worker, make_work("r1"))
    engine.permits.release(100)

    assert (await first)[-1].text == "abcde"


async def test_a_deadline_during_decoding_frees_the_sequence(
    engine, make_worker, make_work, collect, until
):
    engine.permits = threading.Semaphore(1)
    worker = make_worker()
    with pytest.raises(DeadlineExceededError) as caught:
        await collect(worker, make_work("slow", max_tokens=1000, deadline_s=0.05))
    engine.permits.release(100)
    await until(lambda: engine.cancelled)

    assert caught.value.phase == "decode"
    assert not engine.has_work
    assert (await collect(worker, make_work("next")))[-1].text == "abcde"


async def test_a_deadline_in_the_queue_says_so(engine, make_worker, make_work, collect, until):
    engine.permits = threading.Semaphore(0)
    worker = make_worker(max_sequences=1)
    first = asyncio.create_task(collect(worker, make_work("r1")))
    await until(lambda: engine.batches)
    with pytest.raises(DeadlineExceededError) as caught:
        await collect(worker, make_work("r2", deadline_s=0.02))
    engine.permits.release(100)
    await first

    assert caught.value.phase == "queue"
    assert "r2" not in engine.works


async def test_a_deadline_during_the_hand_off_says_so(
    engine, make_worker, make_work, make_handle, collect, slow_transport
):
    worker = make_worker(transport=slow_transport)
    with pytest.raises(DeadlineExceededError) as caught:
        await collect(worker, make_work(documents=[make_handle(4)], deadline_s=0.02))

    assert caught.value.phase == "handoff"
    assert not engine.works


async def test_cancelling_during_the_hand_off_never_starts_the_sequence(
    engine, make_worker, make_work, make_handle, collect, slow_transport
):
    worker = make_worker(transport=slow_transport)
    task = asyncio.create_task(collect(worker, make_work(documents=[make_handle(4)])))
    await asyncio.sleep(0.01)
    await worker.cancel("r1")
    slow_transport.gate.set()

    with pytest.raises(CancelledError):
        await task
    assert not engine.works


async def test_requests_whose_callers_are_not_heard_of_are_freed_and_the_others_go_on(
    engine, make_worker, make_work, collect, until
):
    engine.permits = threading.Semaphore(2)
    worker = make_worker()
    alive = asyncio.create_task(collect(worker, make_work("alive", max_tokens=6)))
    dead = asyncio.create_task(collect(worker, make_work("dead", max_tokens=1000)))
    await until(lambda: engine.batches and "dead" in engine.batches[-1])
    await asyncio.sleep(0.05)
    worker.confirm(["alive", "unknown"])
    worker.drop_unconfirmed(older_than_s=0.05)

    with pytest.raises(UnavailableError):
        await dead
    engine.permits.release(100)
    outputs = await alive
    assert engine.cancelled == ["dead"]
    assert outputs[-1].text == "abcdef"
    assert worker.num_sequences == 0
