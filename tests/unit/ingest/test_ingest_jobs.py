import asyncio

import pytest

from orthros_service.errors import (
    EngineError,
    StateMismatchError,
    UnavailableError,
)

SHORT = "abcd"
LONG = "abcdefghijklmnopqrstuvwxyz"
LONG_STEPS = 7


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
    await world.settle()
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
    await world.settle()
    assert world.recorder.of(document.content_key)[-1].error_message == "wrong model"
    world.worker.before_step = lambda step: None

    handle = await world.ingestor.wait_ready(document, timeout_s=5)

    world.check(handle, LONG, "linear")
    assert world.recorder.of(document.content_key)[-1].status == "ready"


@pytest.mark.parametrize("failing_step", range(LONG_STEPS))
async def test_a_step_that_fails_twice_is_retried_with_the_same_context(world, failing_step):
    failures = []

    def fail_twice(step):
        if step.start == 4 * failing_step and len(failures) < 2:
            failures.append(step)
            raise UnavailableError("replica died")

    world.worker.before_step = fail_twice
    handle = await world.ingestor.wait_ready(world.document(LONG), timeout_s=5)

    world.check(handle, LONG, "linear")
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

    world.check(handle, LONG, "linear")
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
    await world.settle()
    assert world.recorder.of(document.content_key)[-1].error_code == "engine_error"
