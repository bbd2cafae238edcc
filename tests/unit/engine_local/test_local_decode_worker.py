import asyncio
import logging
import threading
from contextlib import aclosing
from dataclasses import replace

import pytest

from orthros_service.engine.types import DecodeDelta, DecodeFinished
from orthros_service.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineError,
    StateCorruptedError,
    StateError,
    StateMismatchError,
    UnavailableError,
)
from orthros_service.telemetry.context import current_request_id, log_context


async def collect(worker, work) -> list:
    return [output async for output in worker.generate(work)]


async def read_to_end(generator) -> None:
    async with aclosing(generator):
        async for _ in generator:
            pass


async def until(holds) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - there is no event for an arbitrary condition
            await asyncio.sleep(0.001)


async def test_the_deltas_of_a_request_join_to_its_text(make_worker, make_work):
    outputs = await collect(make_worker(), make_work(max_tokens=40))

    finished = outputs[-1]
    assert isinstance(finished, DecodeFinished)
    deltas = outputs[:-1]
    assert all(isinstance(delta, DecodeDelta) for delta in deltas)
    assert "".join(delta.text for delta in deltas) == finished.text
    assert sum(delta.num_tokens for delta in deltas) == finished.completion_tokens == 40


async def test_requests_are_batched_and_each_gets_its_own_outputs(engine, make_worker, make_work):
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
    engine, make_worker, make_work
):
    worker = make_worker()
    await asyncio.gather(*(collect(worker, make_work(f"r{n}")) for n in range(6)))
    generator = worker.generate(make_work("last", max_tokens=1000))
    await anext(generator)
    await generator.aclose()
    await until(lambda: "last" in engine.cancelled)

    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


async def test_more_requests_than_fit_wait_in_order(engine, make_worker, make_work):
    worker = make_worker(max_sequences=2)
    results = await asyncio.gather(
        *(collect(worker, make_work(f"r{n}", max_tokens=3)) for n in range(7))
    )

    assert all(outputs[-1].text == "abc" for outputs in results)
    assert max(len(batch) for batch in engine.batches) == 2
    order = list(engine.works)
    assert order == sorted(order)
    assert results[6][-1].queue_s > results[0][-1].queue_s


async def test_new_work_joins_between_two_steps(engine, make_worker, make_work):
    engine.permits = threading.Semaphore(0)
    worker = make_worker()
    first = asyncio.create_task(collect(worker, make_work("r1", max_tokens=4)))
    await until(lambda: engine.batches == [["r1"]])
    second = asyncio.create_task(collect(worker, make_work("r2", max_tokens=2)))
    await asyncio.sleep(0.01)
    engine.permits.release(100)
    await asyncio.gather(first, second)

    assert engine.batches == [["r1"], ["r1", "r2"], ["r1", "r2"], ["r1"]]


# Cancelling


@pytest.mark.parametrize("how", ["close", "cancel task", "revoke"])
async def test_a_request_that_is_left_frees_its_sequence_before_the_next_step(
    engine, make_worker, make_work, how
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


async def test_a_request_that_is_left_in_the_queue_never_starts(engine, make_worker, make_work):
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


async def test_an_id_can_be_used_again_right_after_it_was_left(engine, make_worker, make_work):
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
    engine, make_worker, make_work
):
    engine.permits = threading.Semaphore(0)
    worker = make_worker()
    first = asyncio.create_task(collect(worker, make_work("r1")))
    await until(lambda: engine.batches)
    with pytest.raises(EngineError, match="r1"):
        await collect(worker, make_work("r1"))
    engine.permits.release(100)

    assert (await first)[-1].text == "abcde"


# Deadlines


async def test_a_deadline_during_decoding_frees_the_sequence(engine, make_worker, make_work):
    engine.permits = threading.Semaphore(1)
    worker = make_worker()
    with pytest.raises(DeadlineExceededError) as caught:
        await collect(worker, make_work("slow", max_tokens=1000, deadline_s=0.05))
    engine.permits.release(100)
    await until(lambda: engine.cancelled)

    assert caught.value.phase == "decode"
    assert not engine.has_work
    assert (await collect(worker, make_work("next")))[-1].text == "abcde"


async def test_a_deadline_in_the_queue_says_so(engine, make_worker, make_work):
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


class SlowTransport:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.gate = asyncio.Event()

    async def put(self, segment):
        return segment

    async def get_many(self, refs):
        if self.error is not None:
            raise self.error
        await self.gate.wait()
        return list(refs)


async def test_a_deadline_during_the_hand_off_says_so(engine, make_worker, make_work, make_handle):
    worker = make_worker(transport=SlowTransport())
    with pytest.raises(DeadlineExceededError) as caught:
        await collect(worker, make_work(documents=[make_handle(4)], deadline_s=0.02))

    assert caught.value.phase == "handoff"
    assert not engine.works


async def test_cancelling_during_the_hand_off_never_starts_the_sequence(
    engine, make_worker, make_work, make_handle
):
    transport = SlowTransport()
    worker = make_worker(transport=transport)
    task = asyncio.create_task(collect(worker, make_work(documents=[make_handle(4)])))
    await asyncio.sleep(0.01)
    await worker.cancel("r1")
    transport.gate.set()

    with pytest.raises(CancelledError):
        await task
    assert not engine.works


# Documents


async def test_states_are_built_from_the_handles_in_order(
    engine, make_worker, make_work, make_handle
):
    documents = [make_handle(9), make_handle(3, key="cd"), make_handle(4, key="ef")]
    outputs = await collect(make_worker(), make_work(documents=documents))

    assert [state.num_tokens for state in engine.states["r1"]] == [9, 3, 4]
    assert [len(state.segments) for state in engine.states["r1"]] == [3, 1, 1]
    assert engine.states["r1"][0].segments[0] is documents[0].segments[0]
    assert outputs[-1].handoff_s > 0


async def test_a_state_in_the_other_mode_is_taken(make_worker, make_work, make_handle, layout):
    document = make_handle(4, layout=replace(layout, mode="linear"))
    outputs = await collect(make_worker(), make_work(documents=[document]))

    assert outputs[-1].text == "abcde"


async def test_a_state_of_another_model_is_refused(
    engine, make_worker, make_work, make_handle, layout
):
    document = make_handle(4, layout=replace(layout, model_digest="other"))
    with pytest.raises(StateMismatchError, match="model_digest"):
        await collect(make_worker(), make_work(documents=[document]))
    assert not engine.works


async def test_a_state_with_a_gap_or_of_another_length_is_refused(
    make_worker, make_work, make_handle
):
    whole = make_handle(12)
    gap = replace(whole, segments=whole.segments[:1] + whole.segments[2:])
    short = replace(whole, segments=whole.segments[:2])

    with pytest.raises(StateMismatchError, match="contiguous"):
        await collect(make_worker(), make_work(documents=[gap]))
    with pytest.raises(StateCorruptedError, match="8 tokens, 12"):
        await collect(make_worker(), make_work(documents=[short]))


async def test_a_lost_segment_reaches_its_request_only(make_worker, make_work, make_handle):
    worker = make_worker(transport=SlowTransport(StateError("the object is gone")))
    lost, fine = await asyncio.gather(
        collect(worker, make_work("r1", documents=[make_handle(4)])),
        collect(make_worker(), make_work("r2")),
        return_exceptions=True,
    )

    assert isinstance(lost, StateError)
    assert fine[-1].text == "abcde"


# Engines that fail


@pytest.mark.parametrize("error", [RuntimeError("secret text"), EngineError("out of pages")])
async def test_a_failing_step_ends_the_batch_with_errors_and_the_worker_goes_on(
    engine, make_worker, make_work, error, caplog
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
async def test_a_sequence_that_cannot_be_added_fails_alone(engine, make_worker, make_work, error):
    engine.fail_add["bad"] = error
    worker = make_worker()
    bad, good = await asyncio.gather(
        collect(worker, make_work("bad")),
        collect(worker, make_work("good")),
        return_exceptions=True,
    )

    assert isinstance(bad, EngineError)
    assert good[-1].text == "abcde"


async def test_a_failed_sequence_fails_alone(engine, make_worker, make_work):
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
    engine, make_worker, make_work
):
    engine.is_losing = True
    with pytest.raises(EngineError, match="lost"):
        await collect(make_worker(), make_work())


# Streaming


async def test_text_is_coalesced_over_the_interval_and_the_first_comes_at_once(
    engine, make_worker, make_work
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


async def test_the_end_does_not_wait_for_the_interval(make_worker, make_work):
    worker = make_worker(stream_interval_s=30.0)
    async with asyncio.timeout(5):
        outputs = await collect(worker, make_work(max_tokens=30))

    assert "".join(output.text for output in outputs[:-1]) == outputs[-1].text


async def test_tokens_without_text_are_counted_with_the_next_text(engine, make_worker, make_work):
    engine.letter = lambda index: "é" if index % 3 == 2 else ""
    outputs = await collect(make_worker(), make_work(max_tokens=9))

    assert all(output.text for output in outputs[:-1])
    assert sum(output.num_tokens for output in outputs[:-1]) == 9


async def test_a_slow_reader_holds_up_neither_the_batch_nor_memory(engine, make_worker, make_work):
    worker = make_worker()
    slow = worker.generate(make_work("slow", max_tokens=3000))
    await anext(slow)
    outputs = await collect(worker, make_work("fast", max_tokens=5))
    assert outputs[-1].text == "abcde"
    await until(lambda: not engine.has_work)

    rest = [output async for output in slow]
    assert len(rest) == 2
    assert rest[0].num_tokens + 1 >= 2999


async def test_timings_of_the_engine_are_kept(make_worker, make_work):
    finished = (await collect(make_worker(), make_work()))[-1]

    assert (finished.first_token_s, finished.decode_s) == (0.25, 0.5)
    assert finished.queue_s > 0


# Life


async def test_closing_answers_everyone_and_refuses_new_work(engine, make_worker, make_work):
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
    engine, make_worker, make_work
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
