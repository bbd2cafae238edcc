import asyncio
import json
import logging
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.fs
import pytest

from orthros_service.errors import InvalidValueError, StateError
from orthros_service.settings import StateSettings
from orthros_service.state.disk import DiskTier
from orthros_service.state.store import StateStore
from orthros_service.state.transport import LocalTransport
from orthros_service.state.types import AttentionState, StateHandle

KEY = "ab" * 32
KEYS = [f"{number:064x}" for number in range(8)]


@pytest.fixture
def open_store(tmp_path):
    def make(*, memory_bytes=1 << 20, uri=None, header_ids=()) -> StateStore:
        settings = StateSettings(uri=uri or str(tmp_path / "states"), memory_bytes=memory_bytes)
        return StateStore(settings=settings, transport=LocalTransport(), header_ids=header_ids)

    return make


@pytest.fixture
def make_handle(layout, make_segments):
    def make(num_tokens=10, *, key=KEY, seed=0) -> StateHandle:
        state = AttentionState(layout=layout, segments=make_segments(num_tokens, seed=seed))
        return StateHandle(
            content_key=key,
            layout=layout,
            segments=tuple(state.segments),
            num_tokens=state.num_tokens,
            num_bytes=state.num_bytes,
        )

    return make


def assert_same(left: StateHandle, right: StateHandle) -> None:
    assert left.content_key == right.content_key
    assert left.layout == right.layout
    assert (left.num_tokens, left.num_bytes) == (right.num_tokens, right.num_bytes)
    assert len(left.segments) == len(right.segments)
    for one, other in zip(left.segments, right.segments, strict=True):
        assert one.start == other.start
        for name in ("token_ids", "char_starts", "char_ends", "kv"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


def files_of(tmp_path: Path, pattern: str) -> list[Path]:
    return sorted((tmp_path / "states").rglob(pattern))


async def test_a_durable_state_survives_a_restart_unchanged(open_store, make_handle, layout):
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
    open_store, make_handle, layout
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
    open_store, make_handle, layout
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
    open_store, make_handle, layout, tmp_path
):
    store = open_store()
    await store.put(make_handle(), is_durable=True)
    await store.put(make_handle(key=KEYS[1]), is_durable=True)

    await store.delete(KEY)
    await store.delete(KEYS[2])

    assert await store.get(KEY, layout) is None
    assert {path.parts[-3] for path in files_of(tmp_path, "*.arrow")} == {KEYS[1]}


async def test_stats_count_both_tiers(open_store, make_handle, layout, tmp_path):
    store = open_store()
    await store.put(make_handle(), is_durable=True)
    await store.put(make_handle(key=KEYS[1]), is_durable=False)
    await store.append(KEYS[2], layout, 0, make_handle().segments[0])

    stats = await store.stats()

    assert stats.disk_states == 1
    assert stats.disk_bytes == sum(p.stat().st_size for p in files_of(tmp_path, "*.arrow"))
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


# Damage


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _flip_in_keys(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _scribble(path: Path) -> None:
    path.write_bytes(b"\x00garbage" * 50)


@pytest.mark.parametrize("damage", [_truncate, _empty, _scribble, Path.unlink])
@pytest.mark.parametrize("index", [0, 1, 2])
async def test_a_damaged_segment_is_a_miss_and_the_good_ones_before_it_are_reused(
    open_store, make_handle, layout, tmp_path, caplog, damage, index
):
    handle = make_handle(10)
    await open_store().put(handle, is_durable=True)
    damage(files_of(tmp_path, "*.arrow")[index])
    store = open_store()

    with caplog.at_level(logging.WARNING):
        assert await store.get(KEY, layout) is None
    assert caplog.records
    assert not files_of(tmp_path, "manifest.json")

    adopted = await store.adopt_partial(KEY, layout)
    assert [segment.start for segment in adopted] == [0, 4, 8][:index]
    assert len(files_of(tmp_path, "*.arrow")) == index
    await store.put(handle, is_durable=True)
    read = await open_store().get(KEY, layout)
    assert read is not None
    assert_same(read, handle)


async def test_swapped_segment_files_are_a_miss(open_store, make_handle, layout, tmp_path):
    await open_store().put(make_handle(8), is_durable=True)
    first, second = files_of(tmp_path, "*.arrow")
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)

    assert await open_store().get(KEY, layout) is None


async def test_a_file_of_another_document_is_a_miss(open_store, make_handle, layout, tmp_path):
    store = open_store()
    await store.put(make_handle(4), is_durable=True)
    await store.put(make_handle(4, key=KEYS[1], seed=1), is_durable=True)
    foreign, own = files_of(tmp_path, "*.arrow")
    assert own.parts[-3] == KEY
    own.write_bytes(foreign.read_bytes())

    assert await open_store().get(KEY, layout) is None


@pytest.mark.parametrize(
    "change",
    [
        {"num_segments": 2},
        {"num_segments": 4},
        {"num_segments": 10**15},
        {"num_segments": -1},
        {"num_segments": "3"},
        {"num_segments": True},
        {"num_tokens": 9},
        {"layout": None},
        {"layout": {"format_version": 7}},
    ],
)
async def test_a_wrong_manifest_is_a_miss(open_store, make_handle, layout, tmp_path, change):
    await open_store().put(make_handle(10), is_durable=True)
    path = files_of(tmp_path, "manifest.json")[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    assert await open_store().get(KEY, layout) is None
    assert not path.exists()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"layout": {}}'])
async def test_an_unreadable_manifest_is_a_miss_and_its_segments_are_reused(
    open_store, make_handle, layout, tmp_path, data
):
    await open_store().put(make_handle(10), is_durable=True)
    files_of(tmp_path, "manifest.json")[0].write_bytes(data)
    store = open_store()

    assert await store.get(KEY, layout) is None
    assert len(await store.adopt_partial(KEY, layout)) == 3


async def test_a_flipped_bit_in_the_keys_is_a_miss(open_store, make_segments, layout, tmp_path):
    layout = replace(layout, head_dim=512)
    shape = (2, 2, 1, 4, 512)
    segment = replace(make_segments(4)[0], kv=np.zeros(shape, np.int16))
    handle = StateHandle(
        content_key=KEY, layout=layout, segments=(segment,), num_tokens=4, num_bytes=1
    )
    await open_store().put(handle, is_durable=True)
    _flip_in_keys(files_of(tmp_path, "*.arrow")[0])

    assert await open_store().get(KEY, layout) is None


# Unfinished states


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
    open_store, make_handle, layout, tmp_path
):
    await open_store().append(KEY, layout, 0, make_handle().segments[0])

    assert await open_store().adopt_partial(KEY, replace(layout, mode="full")) == []
    assert not files_of(tmp_path, "*.arrow")


async def test_adopting_clears_what_an_interrupted_write_left(
    open_store, make_handle, layout, tmp_path
):
    await open_store().append(KEY, layout, 0, make_handle().segments[0])
    leftover = files_of(tmp_path, "*.arrow")[0].with_suffix(".arrow.0123.tmp")
    leftover.write_bytes(b"half")

    assert len(await open_store().adopt_partial(KEY, layout)) == 1
    assert not leftover.exists()


async def test_a_write_in_flight_ends_before_its_cancellation_returns(
    open_store, make_handle, layout, monkeypatch, tmp_path
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
    assert not files_of(tmp_path, "*")


# Disks that fail


@pytest.mark.parametrize("method", ["write_segment", "write_manifest", "has_manifest"])
async def test_a_full_disk_keeps_the_state_in_memory_and_is_logged_once(
    open_store, make_handle, layout, monkeypatch, caplog, method
):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskTier, method, fail)
    store, handle = open_store(), make_handle(10)

    with caplog.at_level(logging.WARNING):
        for index, segment in enumerate(handle.segments):
            await store.append(KEY, layout, index, segment)
        await store.put(handle, is_durable=True)

    assert store.peek(KEY, layout) is handle
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


async def test_a_file_where_the_folder_should_be_costs_only_durability(
    open_store, make_handle, layout, tmp_path
):
    (tmp_path / "states").write_text("in the way")
    store = open_store()

    assert await store.get(KEY, layout) is None
    assert await store.adopt_partial(KEY, layout) == []
    await store.put(make_handle(), is_durable=True)
    assert store.peek(KEY, layout) is not None
    await store.delete(KEY)
    assert store.peek(KEY, layout) is None


async def test_a_failed_write_leaves_no_partial_file(
    open_store, make_handle, layout, monkeypatch, tmp_path
):
    def fail_midway(segment, *, layout, content_key, sink):
        sink.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orthros_service.state.disk.write_segment", fail_midway)
    await open_store().append(KEY, layout, 0, make_handle().segments[0])

    assert [path for path in files_of(tmp_path, "*") if path.is_file()] == []


async def test_a_disk_that_cannot_be_read_for_now_loses_nothing(
    open_store, make_handle, layout, monkeypatch
):
    await open_store().put(make_handle(), is_durable=True)

    def fail(*args):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_open", fail)
        assert await open_store().get(KEY, layout) is None
        assert await open_store().adopt_partial(KEY, layout) == []

    assert await open_store().get(KEY, layout) is not None


async def test_a_file_system_without_memory_maps_gives_the_same_state(
    open_store, make_handle, layout, tmp_path, monkeypatch
):
    remote = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    registry = SimpleNamespace(from_uri=lambda uri: (remote, "bucket/states"))
    monkeypatch.setattr(pyarrow.fs, "FileSystem", registry)
    handle = make_handle()
    await open_store(uri="remote://bucket/states").put(handle, is_durable=True)

    read = await open_store(uri="remote://bucket/states").get(KEY, layout)

    assert read is not None
    assert_same(read, handle)


def test_an_unknown_file_system_is_refused_with_its_uri():
    with pytest.raises(InvalidValueError, match="nosuch://x"):
        DiskTier("nosuch://x")


async def test_the_local_transport_refuses_references_of_another():
    with pytest.raises(StateError, match="bytes"):
        await LocalTransport().get_many([b"object id"])
