import asyncio
import logging
import threading

import pytest

from orthros_service.errors import (
    EngineError,
)


@pytest.mark.parametrize("error", [RuntimeError("secret text"), EngineError("out of pages")])
async def test_a_failing_step_ends_the_batch_with_errors_and_the_worker_goes_on(
    engine, make_worker, make_work, error, caplog, collect, until
):
    engine.permits = threading.Semaphore(0)
    worker = make_worker(max_sequences=2)
    tasks = [asyncio.create_task(collect(worker, make_work(f"r{n}"))) for n in range(3)]
    await until(lambda: engine.batches)
    engine.fail_step = error
    with caplog.at_level(logging.ERROR):
        engine.permits.release(100)
        results = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(results[0], EngineError)
    assert isinstance(results[1], EngineError)
    assert "secret" not in results[0].message
    assert results[2][-1].text == "abcde"
    assert sorted(engine.cancelled) == ["r0", "r1"]
    assert (await collect(worker, make_work("later")))[-1].text == "abcde"


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), EngineError("out of pages")])
async def test_a_sequence_that_cannot_be_added_fails_alone(
    engine, make_worker, make_work, error, collect
):
    engine.fail_add["bad"] = error
    worker = make_worker()
    bad, good = await asyncio.gather(
        collect(worker, make_work("bad")),
        collect(worker, make_work("good")),
        return_exceptions=True,
    )

    assert isinstance(bad, EngineError)
    assert good[-1].text == "abcde"


async def test_a_failed_sequence_fails_alone(engine, make_worker, make_work, collect):
    error = EngineError("logits are not finite")
    engine.fail_sequence["bad"] = error
    worker = make_worker()
    bad, good = await asyncio.gather(
        collect(worker, make_work("bad")),
        collect(worker, make_work("good")),
        return_exceptions=True,
    )

    assert bad is error
    assert good[-1].text == "abcde"


async def test_a_sequence_that_the_engine_forgets_is_an_error_not_a_hang(
    engine, make_worker, make_work, collect
):
    engine.is_losing = True
    with pytest.raises(EngineError, match="lost"):
        await collect(make_worker(), make_work())
