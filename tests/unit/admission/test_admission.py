import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from orthros_service.admission import Admission
from orthros_service.errors import DeadlineExceededError, OverloadedError
from orthros_service.telemetry import PrometheusMetrics


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _admission(running: int = 1, waiting: int = 8, clock: Clock | None = None) -> Admission:
    return Admission(
        max_running=running,
        max_waiting=waiting,
        metrics=PrometheusMetrics(),
        clock=clock or Clock(),
    )


@asynccontextmanager
async def _holder(admission: Admission) -> AsyncIterator[asyncio.Event]:
    release = asyncio.Event()

    async def hold() -> None:
        async with admission.slot(timeout_s=5):
            await release.wait()

    task = asyncio.create_task(hold())
    await asyncio.sleep(0)
    try:
        yield release
    finally:
        release.set()
        await task


async def test_never_more_than_the_limit_run_at_once() -> None:
    admission = _admission(running=3, waiting=100)
    most = 0

    async def work() -> None:
        nonlocal most
        async with admission.slot(timeout_s=5):
            most = max(most, admission.num_running)
            await asyncio.sleep(0.001)

    await asyncio.gather(*(work() for _ in range(30)))
    assert most == 3
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_slots_are_given_in_the_order_of_arrival() -> None:
    admission = _admission()
    order: list[int] = []

    async def work(number: int) -> None:
        async with admission.slot(timeout_s=5):
            order.append(number)

    async with _holder(admission) as release:
        tasks = [asyncio.create_task(work(number)) for number in range(6)]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks)
    assert order == list(range(6))


async def test_one_more_than_may_wait_is_refused_at_once_with_a_time_to_come_back() -> None:
    admission = _admission(waiting=0)
    async with _holder(admission):
        with pytest.raises(OverloadedError) as caught:
            async with admission.slot(timeout_s=5):
                pass
    assert caught.value.phase == "queue"
    assert caught.value.details["retry_after_s"] == admission.retry_after_s() == 2.0
    assert admission.num_running == 0


async def test_the_time_to_come_back_follows_measured_durations_and_stays_in_bounds() -> None:
    clock = Clock()
    admission = _admission(running=2, clock=clock)
    for _ in range(60):
        async with admission.slot(timeout_s=5):
            clock.now += 20
    assert admission.retry_after_s() == 10
    for _ in range(60):
        async with admission.slot(timeout_s=5):
            clock.now += 10_000
    assert admission.retry_after_s() == 60
    for _ in range(90):
        async with admission.slot(timeout_s=5):
            clock.now += 0.01
    assert admission.retry_after_s() == 1


async def test_a_wait_past_the_deadline_ends_with_deadline_exceeded_and_leaves_the_queue() -> None:
    admission = _admission()
    async with _holder(admission):
        with pytest.raises(DeadlineExceededError):
            async with admission.slot(timeout_s=0.01):
                pass
        assert admission.num_waiting == 0


async def test_a_cancelled_waiter_leaves_the_queue_and_the_next_one_runs() -> None:
    admission = _admission()

    async def work() -> str:
        async with admission.slot(timeout_s=5):
            return "done"

    async with _holder(admission) as release:
        gone, stays = asyncio.create_task(work()), asyncio.create_task(work())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert admission.num_waiting == 1
        release.set()
        assert await stays == "done"
    assert admission.num_running == 0


async def test_a_slot_given_to_a_waiter_that_is_cancelled_in_the_same_moment_is_not_lost() -> None:
    admission = _admission()

    async def work() -> None:
        async with admission.slot(timeout_s=5):
            pass

    async with _holder(admission) as release:
        waiter = asyncio.create_task(work())
        await asyncio.sleep(0)
        release.set()
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    assert (admission.num_running, admission.num_waiting) == (0, 0)
    async with admission.slot(timeout_s=0.01):
        assert admission.num_running == 1


async def test_a_failure_inside_the_slot_gives_it_back() -> None:
    admission = _admission()
    with pytest.raises(RuntimeError):
        async with admission.slot(timeout_s=5):
            raise RuntimeError
    assert admission.num_running == 0


async def test_idle_is_when_nothing_runs_or_waits() -> None:
    admission = _admission()
    await asyncio.wait_for(admission.wait_idle(), 1)
    async with _holder(admission):
        waiting = asyncio.create_task(admission.wait_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)
