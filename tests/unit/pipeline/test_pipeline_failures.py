import asyncio
import logging

import pytest

from orthros_service.engine.types import DecodeDelta
from orthros_service.errors import (
    EngineError,
    InvalidValueError,
    StateMismatchError,
    UnavailableError,
)
from orthros_service.types import TokenDelta


async def test_a_document_that_fails_ends_the_wait_for_the_others(world):
    keys = [world.document(text).content_key for text in ("slow", "bad")]
    world.coordinator.gates[keys[0]] = asyncio.Event()
    error = StateMismatchError("wrong model")
    world.coordinator.errors[keys[1]] = error
    with pytest.raises(StateMismatchError) as caught:
        await world.collect(world.request("slow", "bad"))
    await asyncio.sleep(0)

    assert caught.value is error
    assert world.coordinator.num_cancelled == 1
    assert world.decoder.works == []


async def dies(work):
    raise UnavailableError("replica died")
    yield


async def dies_late(work):
    yield DecodeDelta(text="y", num_tokens=1)
    raise UnavailableError("replica died")


async def fails(work):
    raise EngineError("out of pages")
    yield


async def ends_early(work):
    yield DecodeDelta(text="y", num_tokens=1)


async def test_a_worker_that_dies_before_the_first_output_is_replaced_once(world):
    world.decoder.scripts = [dies]
    events = await world.collect(world.request("text"))

    assert events[-1].text == "yes!"
    assert len(world.decoder.works) == 2

    world.decoder.scripts = [dies, dies]
    with pytest.raises(UnavailableError):
        await world.collect(world.request("text"))


async def test_a_worker_that_dies_after_text_was_sent_is_an_error(world):
    world.decoder.scripts = [dies_late]
    with pytest.raises(UnavailableError):
        await world.collect(world.request("text"))

    assert world.events == [TokenDelta(text="y", num_tokens=1)]
    assert len(world.decoder.works) == 1


async def dies_before_any_text(work):
    # The first bytes of a character, for instance.
    yield DecodeDelta(text="", num_tokens=1)
    raise UnavailableError("replica died")


@pytest.mark.parametrize(
    ("script", "is_streamed"), [(dies_late, False), (dies_before_any_text, True)]
)
async def test_a_worker_that_dies_before_its_caller_saw_any_text_is_replaced_once(
    world, caplog, script, is_streamed
):
    world.decoder.scripts = [script]
    events = await world.collect(world.request("text", is_streamed=is_streamed))

    assert events[-1].text == "yes!"
    assert [work.request_id for work in world.decoder.works] == ["r1", "r1"]
    assert "r1 is sent to another decode worker, retry 1 of 1" in caplog.text

    world.decoder.scripts = [script, script]
    with pytest.raises(UnavailableError):
        await world.collect(world.request("text", is_streamed=is_streamed))
    assert len(world.decoder.works) == 4


async def test_other_errors_are_not_retried(world):
    world.decoder.scripts = [fails]
    with pytest.raises(EngineError, match="out of pages"):
        await world.collect(world.request("text"))

    assert len(world.decoder.works) == 1


async def test_a_stream_that_ends_without_a_result_is_an_error(world):
    world.decoder.scripts = [ends_early]
    with pytest.raises(EngineError, match="without a result"):
        await world.collect(world.request("text"))


async def test_an_id_that_is_running_is_refused_and_can_be_used_again_later(world):
    first = world.pipeline.generate(world.request("text"))
    await anext(first)
    with pytest.raises(InvalidValueError, match="r1"):
        await world.collect(world.request("text"))
    assert len([event async for event in first]) == 4
    assert len(await world.collect(world.request("text"))) == 5


@pytest.mark.parametrize(
    ("script", "outcome"), [(fails, "engine_error"), (dies_late, "unavailable")]
)
async def test_a_failed_request_logs_its_code(world, caplog, script, outcome):
    world.decoder.scripts = [script]
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(EngineError if script is fails else UnavailableError),
    ):
        await world.collect(world.request("text"))

    assert [vars(one)["outcome"] for one in caplog.records if hasattr(one, "outcome")] == [outcome]


async def loses_a_state(work):
    raise UnavailableError("a segment is gone", phase="handoff")
    yield


async def test_a_state_that_is_lost_on_its_way_is_asked_for_again(world):
    world.decoder.scripts = [loses_a_state]
    events = await world.collect(world.request("text"))
    assert events[-1].text == "yes!"
    assert len(world.coordinator.sources) == len(world.decoder.works) == 2

    world.decoder.scripts = [dies]
    await world.collect(world.request("other"))
    assert len(world.coordinator.sources) == 3
