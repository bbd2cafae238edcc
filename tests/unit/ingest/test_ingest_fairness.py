import asyncio

import pytest

SHORT = "abcd"
LONG = "abcdefghijklmnopqrstuvwxyz"
LONG_STEPS = 7


async def test_a_short_document_waits_for_one_step_of_a_long_one_at_most(world):
    world.worker.gate = asyncio.Semaphore(1)
    long = asyncio.create_task(
        world.ingestor.wait_ready(world.document("x" * 90, document_id=None), timeout_s=5)
    )
    await world.until_steps(2)
    short = asyncio.create_task(
        world.ingestor.wait_ready(world.document(SHORT, document_id=None), timeout_s=5)
    )
    await world.settle()
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
