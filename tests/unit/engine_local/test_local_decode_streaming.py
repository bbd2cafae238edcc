import asyncio
import logging
import threading
from contextlib import aclosing

import pytest

from orthros_service.engine.types import DecodeDelta
from orthros_service.errors import (
    EngineError,
    UnavailableError,
)
from orthros_service.telemetry.context import current_request_id, log_context


async def test_text_is_coalesced_over_the_interval_and_the_first_comes_at_once(
    engine, make_worker, make_work, until
):
    engine.permits = threading.Semaphore(1)
    worker = make_worker(stream_interval_s=0.2)
    async with aclosing(worker.generate(make_work(max_tokens=21))) as outputs:
        first = await anext(outputs)
        assert first == DecodeDelta(text="a", num_tokens=1)
        engine.permits.release(19)
        await until(lambda: len(engine.batches) == 21)
        second = await anext(outputs)
        assert second == DecodeDelta(text="bcdefghijklmnopqrst", num_tokens=19)
        engine.permits.release(1)
        third, finished = await anext(outputs), await anext(outputs)

    assert third == DecodeDelta(text="u", num_tokens=1)
    assert finished.completion_tokens == 21


async def test_the_end_does_not_wait_for_the_interval(make_worker, make_work, collect):
    worker = make_worker(stream_interval_s=30.0)
    async with asyncio.timeout(5):
        outputs = await collect(worker, make_work(max_tokens=30))

    assert "".join(output.text for output in outputs[:-1]) == outputs[-1].text


async def test_tokens_without_text_are_counted_with_the_next_text(
    engine, make_worker, make_work, collect
):
    engine.letter = lambda index: "é" if index % 3 == 2 else ""
    outputs = await collect(make_worker(), make_work(max_tokens=9))

    assert all(output.text for output in outputs[:-1])
    assert sum(output.num_tokens for output in outputs[:-1]) == 9


async def test_a_slow_reader_holds_up_neither_the_batch_nor_memory(
    engine, make_worker, make_work, collect, until
):
    worker = make_worker()
    slow = worker.generate(make_work("slow", max_tokens=500))
    first = await anext(slow)
    outputs = await collect(worker, make_work("fast", max_tokens=5))
    assert outputs[-1].text == "abcde"
    await until(lambda: not engine.has_work)

    rest = [output async for output in slow]
    # One merged delta, perhaps one more that was still on its way, and the end.
    assert len(rest) <= 3
    assert first.text + "".join(delta.text for delta in rest[:-1]) == rest[-1].text


async def test_timings_of_the_engine_are_kept(make_worker, make_work, collect):
    finished = (await collect(make_worker(), make_work()))[-1]

    assert (finished.first_token_s, finished.decode_s) == (0.25, 0.5)
    assert finished.queue_s > 0


async def test_closing_answers_everyone_and_refuses_new_work(
    engine, make_worker, make_work, collect, until
):
    engine.permits = threading.Semaphore(0)
    worker = make_worker(max_sequences=1)
    assert await worker.is_ready()
    tasks = [asyncio.create_task(collect(worker, make_work(f"r{n}"))) for n in range(3)]
    await until(lambda: engine.batches)
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0.01)
    engine.permits.release(100)
    await closing
    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(result, UnavailableError) for result in results)
    assert not engine.has_work
    assert not await worker.is_ready()
    with pytest.raises(UnavailableError):
        await collect(worker, make_work())


async def test_the_driver_does_not_log_under_the_request_that_woke_it(
    engine, make_worker, make_work, collect
):
    seen = []

    class Recording(logging.Handler):
        def emit(self, record):
            seen.append(current_request_id())

    engine.fail_step = RuntimeError("boom")
    handler = Recording()
    logging.getLogger("orthros_service.engine.batch_driver").addHandler(handler)
    try:
        with log_context(request_id="r1"), pytest.raises(EngineError):
            await collect(make_worker(), make_work())
    finally:
        logging.getLogger("orthros_service.engine.batch_driver").removeHandler(handler)

    assert seen == [None]
