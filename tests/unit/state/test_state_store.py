from dataclasses import replace

import numpy as np
import pytest

from orthros_service.errors import InvalidValueError

KEY = "ab" * 32
KEYS = [f"{number:064x}" for number in range(8)]


async def test_a_durable_state_survives_a_restart_unchanged(
    open_store, make_handle, layout, assert_same
):
    handle = make_handle()
    await open_store().put(handle, is_durable=True)

    restarted = open_store()
    read = await restarted.get(KEY, layout)

    assert read is not None
    assert_same(read, handle)
    assert restarted.peek(KEY, layout) is read


async def test_a_state_is_found_without_knowing_its_mode(open_store, make_handle, layout):
    await open_store().put(make_handle(), is_durable=True)

    read = await open_store().get(KEY, replace(layout, mode="full"))

    assert read is not None
    assert read.layout.mode == "linear"


async def test_a_state_that_is_not_durable_leaves_no_file(
    open_store, make_handle, layout, tmp_path
):
    store = open_store()
    await store.put(make_handle(), is_durable=False)

    assert store.peek(KEY, layout) is not None
    assert not (tmp_path / "states").exists()
    assert await open_store().get(KEY, layout) is None


async def test_a_state_in_memory_becomes_durable_when_it_is_put_again(
    open_store, make_handle, layout
):
    store = open_store()
    await store.put(make_handle(), is_durable=False)
    await store.put(make_handle(), is_durable=True)

    assert await open_store().get(KEY, layout) is not None


async def test_the_least_recently_used_state_is_evicted_first(open_store, make_handle, layout):
    size = make_handle().num_bytes
    store = open_store(memory_bytes=3 * size)
    for key in KEYS[:3]:
        await store.put(make_handle(key=key), is_durable=False)

    assert store.peek(KEYS[0], layout) is not None
    await store.put(make_handle(key=KEYS[3]), is_durable=False)

    assert [store.peek(key, layout) is not None for key in KEYS[:4]] == [True, False, True, True]


async def test_memory_never_exceeds_its_budget_and_counts_exactly(open_store, make_handle, layout):
    store = open_store(memory_bytes=1500)
    generator = np.random.default_rng(3)
    for _ in range(200):
        key = KEYS[generator.integers(len(KEYS))]
        if generator.random() < 0.2:
            await store.delete(key)
        else:
            await store.put(make_handle(int(generator.integers(1, 60)), key=key), is_durable=False)
        kept = [handle for key in KEYS if (handle := store.peek(key, layout))]
        stats = await store.stats()
        assert stats.memory_bytes == sum(handle.num_bytes for handle in kept) <= 1500
        assert stats.memory_states == len(kept)


async def test_a_handle_stays_valid_after_its_state_was_evicted_and_deleted(
    open_store, make_handle, layout, assert_same
):
    handle = make_handle()
    await open_store().put(handle, is_durable=True)
    store = open_store(memory_bytes=handle.num_bytes)
    held = await store.get(KEY, layout)
    assert held is not None

    await store.put(make_handle(key=KEYS[1]), is_durable=False)
    await store.delete(KEY)

    assert store.peek(KEY, layout) is None
    assert_same(held, handle)


async def test_a_state_over_the_whole_budget_is_read_from_disk_each_time(
    open_store, make_handle, layout, assert_same
):
    handle = make_handle()
    store = open_store(memory_bytes=handle.num_bytes - 1)
    await store.put(handle, is_durable=True)

    assert store.peek(KEY, layout) is None
    for _ in range(2):
        read = await store.get(KEY, layout)
        assert read is not None
        assert_same(read, handle)


async def test_deleting_removes_every_file_and_absent_states_are_ignored(
    open_store, make_handle, layout, files
):
    store = open_store()
    await store.put(make_handle(), is_durable=True)
    await store.put(make_handle(key=KEYS[1]), is_durable=True)

    await store.delete(KEY)
    await store.delete(KEYS[2])

    assert await store.get(KEY, layout) is None
    assert {path.parts[-3] for path in files("*.arrow")} == {KEYS[1]}


async def test_stats_count_both_tiers(open_store, make_handle, layout, files):
    store = open_store()
    await store.put(make_handle(), is_durable=True)
    await store.put(make_handle(key=KEYS[1]), is_durable=False)
    await store.append(KEYS[2], layout, 0, make_handle().segments[0])

    stats = await store.stats()

    assert stats.disk_states == 1
    assert stats.disk_bytes == sum(p.stat().st_size for p in files("*.arrow"))
    assert stats.memory_states == 2


@pytest.mark.parametrize("key", ["", "ab", "../" + "a" * 61, "AB" * 32, "ab" * 32 + "\n", "g" * 64])
async def test_a_key_that_is_no_digest_never_reaches_the_file_system(
    open_store, layout, make_handle, key, tmp_path
):
    store = open_store()
    calls = [
        store.get(key, layout),
        store.adopt_partial(key, layout),
        store.append(key, layout, 0, make_handle().segments[0]),
        store.put(make_handle(key=key), is_durable=True),
        store.delete(key),
    ]
    for call in calls:
        with pytest.raises(InvalidValueError):
            await call
    assert not (tmp_path / "states").exists()


async def test_another_layout_or_header_does_not_find_the_state(open_store, make_handle, layout):
    await open_store(header_ids=[1, 2]).put(make_handle(), is_durable=True)

    assert await open_store(header_ids=[1, 2]).get(KEY, layout) is not None
    assert await open_store(header_ids=np.array([1, 2], np.int32)).get(KEY, layout) is not None
    assert await open_store(header_ids=[1, 3]).get(KEY, layout) is None
    other = replace(layout, model_digest="model-b")
    assert await open_store(header_ids=[1, 2]).get(KEY, other) is None
