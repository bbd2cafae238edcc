import asyncio
from dataclasses import replace

import pytest

from orthros_service.errors import (
    StateCorruptedError,
    StateError,
    StateMismatchError,
)


async def test_states_are_built_from_the_handles_in_order(
    engine, make_worker, make_work, make_handle, collect
):
    documents = [make_handle(9), make_handle(3, key="cd"), make_handle(4, key="ef")]
    outputs = await collect(make_worker(), make_work(documents=documents))

    assert [state.num_tokens for state in engine.states["r1"]] == [9, 3, 4]
    assert [len(state.segments) for state in engine.states["r1"]] == [3, 1, 1]
    assert engine.states["r1"][0].segments[0] is documents[0].segments[0]
    assert outputs[-1].handoff_s > 0


async def test_a_state_in_the_other_mode_is_taken(
    make_worker, make_work, make_handle, layout, collect
):
    document = make_handle(4, layout=replace(layout, mode="linear"))
    outputs = await collect(make_worker(), make_work(documents=[document]))

    assert outputs[-1].text == "abcde"


async def test_a_state_of_another_model_is_refused(
    engine, make_worker, make_work, make_handle, layout, collect
):
    document = make_handle(4, layout=replace(layout, model_digest="other"))
    with pytest.raises(StateMismatchError, match="model_digest"):
        await collect(make_worker(), make_work(documents=[document]))
    assert not engine.works


async def test_a_state_with_a_gap_or_of_another_length_is_refused(
    make_worker, make_work, make_handle, collect
):
    whole = make_handle(12)
    gap = replace(whole, segments=whole.segments[:1] + whole.segments[2:])
    short = replace(whole, segments=whole.segments[:2])

    with pytest.raises(StateMismatchError, match="contiguous"):
        await collect(make_worker(), make_work(documents=[gap]))
    with pytest.raises(StateCorruptedError, match="8 tokens, 12"):
        await collect(make_worker(), make_work(documents=[short]))


async def test_a_lost_segment_reaches_its_request_only(
    make_worker, make_work, make_handle, collect, slow_transport
):
    slow_transport.error = StateError("the object is gone")
    worker = make_worker(transport=slow_transport)
    lost, fine = await asyncio.gather(
        collect(worker, make_work("r1", documents=[make_handle(4)])),
        collect(make_worker(), make_work("r2")),
        return_exceptions=True,
    )

    assert isinstance(lost, StateError)
    assert fine[-1].text == "abcde"
