import asyncio
import threading
from contextlib import aclosing

from orthros_service.engine.types import DecodeDelta, DecodeFinished


async def read_to_end(generator) -> None:
    async with aclosing(generator):
        async for _ in generator:
            pass


async def test_the_deltas_of_a_request_join_to_its_text(make_worker, make_work, collect):
    outputs = await collect(make_worker(), make_work(max_tokens=40))

    finished = outputs[-1]
    assert isinstance(finished, DecodeFinished)
    deltas = outputs[:-1]
    assert all(isinstance(delta, DecodeDelta) for delta in deltas)
    assert "".join(delta.text for delta in deltas) == finished.text
    assert sum(delta.num_tokens for delta in deltas) == finished.completion_tokens == 40


async def test_requests_are_batched_and_each_gets_its_own_outputs(
    engine, make_worker, make_work, collect, until
):
    engine.permits = threading.Semaphore(0)
    worker = make_worker()
    tasks = [
        asyncio.create_task(collect(worker, make_work(f"r{n}", max_tokens=n))) for n in (2, 3, 4)
    ]
    await until(lambda: engine.batches)
    engine.permits.release(100)
    results = await asyncio.gather(*tasks)

    assert [outputs[-1].text for outputs in results] == ["ab", "abc", "abcd"]
    assert ["r2", "r3", "r4"] in engine.batches
    assert len(engine.batches) <= 5


async def test_the_engine_is_called_from_one_thread_that_is_not_the_loops(
    engine, make_worker, make_work, collect, until
):
    worker = make_worker()
    await asyncio.gather(*(collect(worker, make_work(f"r{n}")) for n in range(6)))
    generator = worker.generate(make_work("last", max_tokens=1000))
    await anext(generator)
    await generator.aclose()
    await until(lambda: "last" in engine.cancelled)

    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


async def test_more_requests_than_fit_wait_in_order(engine, make_worker, make_work, collect):
    worker = make_worker(max_sequences=2)
    results = await asyncio.gather(
        *(collect(worker, make_work(f"r{n}", max_tokens=3)) for n in range(7))
    )

    assert all(outputs[-1].text == "abc" for outputs in results)
    assert max(len(batch) for batch in engine.batches) == 2
    order = list(engine.works)
    assert order == sorted(order)
    assert results[6][-1].queue_s > results[0][-1].queue_s


async def test_new_work_joins_between_two_steps(engine, make_worker, make_work, collect, until):
    engine.permits = threading.Semaphore(0)
    worker = make_worker()
    first = asyncio.create_task(collect(worker, make_work("r1", max_tokens=4)))
    await until(lambda: engine.batches == [["r1"]])
    second = asyncio.create_task(collect(worker, make_work("r2", max_tokens=2)))
    await asyncio.sleep(0.01)
    engine.permits.release(100)
    await asyncio.gather(first, second)

    assert engine.batches == [["r1"], ["r1", "r2"], ["r1", "r2"], ["r1"]]
