import logging
from types import SimpleNamespace

import pyarrow.fs
import pytest

from orthros_service.errors import InvalidValueError, StateError
from orthros_service.state.disk import DiskTier
from orthros_service.state.transport import LocalTransport

KEY = "ab" * 32
KEYS = [f"{number:064x}" for number in range(8)]


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
    open_store, make_handle, layout, monkeypatch, files
):
    def fail_midway(segment, *, layout, content_key, sink):
        sink.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orthros_service.state.disk.write_segment", fail_midway)
    await open_store().append(KEY, layout, 0, make_handle().segments[0])

    assert [path for path in files("*") if path.is_file()] == []


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
    open_store, make_handle, layout, tmp_path, monkeypatch, assert_same
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
