import asyncio
import threading
from dataclasses import replace

import pytest

from orthros_service.state.disk import DiskTier

KEY = "ab" * 32
KEYS = [f"{number:064x}" for number in range(8)]


@pytest.mark.parametrize("num_written", [0, 1, 2, 3])
async def test_an_unfinished_state_is_adopted_up_to_its_last_segment(
    open_store, make_handle, layout, num_written
):
    handle = make_handle(10)
    store = open_store()
    for index in range(num_written):
        await store.append(KEY, layout, index, handle.segments[index])

    restarted = open_store()
    assert await restarted.get(KEY, layout) is None
    adopted = await restarted.adopt_partial(KEY, layout)

    assert [segment.start for segment in adopted] == [0, 4, 8][:num_written]


async def test_segments_behind_a_hole_are_not_adopted(open_store, make_handle, layout):
    handle = make_handle(10)
    store = open_store()
    for index in (0, 2):
        await store.append(KEY, layout, index, handle.segments[index])

    assert len(await open_store().adopt_partial(KEY, layout)) == 1


async def test_segments_of_the_other_mode_are_deleted_not_adopted(
    open_store, make_handle, layout, files
):
    await open_store().append(KEY, layout, 0, make_handle().segments[0])

    assert await open_store().adopt_partial(KEY, replace(layout, mode="full")) == []
    assert not files("*.arrow")


async def test_adopting_clears_what_an_interrupted_write_left(
    open_store, make_handle, layout, files
):
    await open_store().append(KEY, layout, 0, make_handle().segments[0])
    leftover = files("*.arrow")[0].with_suffix(".arrow.0123.tmp")
    leftover.write_bytes(b"half")

    assert len(await open_store().adopt_partial(KEY, layout)) == 1
    assert not leftover.exists()


async def test_a_write_in_flight_ends_before_its_cancellation_returns(
    open_store, make_handle, layout, monkeypatch, files
):
    may_write, is_writing = threading.Event(), threading.Event()
    write_segment = DiskTier.write_segment

    def slow(*args, **kwargs):
        is_writing.set()
        assert may_write.wait(5)
        write_segment(*args, **kwargs)

    monkeypatch.setattr(DiskTier, "write_segment", slow)
    store = open_store()
    task = asyncio.create_task(store.append(KEY, layout, 0, make_handle().segments[0]))
    await asyncio.to_thread(is_writing.wait, 5)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    may_write.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    await store.delete(KEY)
    assert not files("*")
