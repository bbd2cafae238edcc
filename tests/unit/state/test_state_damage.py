import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orthros_service.state.types import StateHandle

KEY = "ab" * 32
KEYS = [f"{number:064x}" for number in range(8)]


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
    open_store, make_handle, layout, caplog, damage, index, assert_same, files
):
    handle = make_handle(10)
    await open_store().put(handle, is_durable=True)
    damage(files("*.arrow")[index])
    store = open_store()

    with caplog.at_level(logging.WARNING):
        assert await store.get(KEY, layout) is None
    assert caplog.records
    assert not files("manifest.json")

    adopted = await store.adopt_partial(KEY, layout)
    assert [segment.start for segment in adopted] == [0, 4, 8][:index]
    assert len(files("*.arrow")) == index
    await store.put(handle, is_durable=True)
    read = await open_store().get(KEY, layout)
    assert read is not None
    assert_same(read, handle)


async def test_swapped_segment_files_are_a_miss(open_store, make_handle, layout, files):
    await open_store().put(make_handle(8), is_durable=True)
    first, second = files("*.arrow")
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)

    assert await open_store().get(KEY, layout) is None


async def test_a_file_of_another_document_is_a_miss(open_store, make_handle, layout, files):
    store = open_store()
    await store.put(make_handle(4), is_durable=True)
    await store.put(make_handle(4, key=KEYS[1], seed=1), is_durable=True)
    foreign, own = files("*.arrow")
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
async def test_a_wrong_manifest_is_a_miss(open_store, make_handle, layout, change, files):
    await open_store().put(make_handle(10), is_durable=True)
    path = files("manifest.json")[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    assert await open_store().get(KEY, layout) is None
    assert not path.exists()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"layout": {}}'])
async def test_an_unreadable_manifest_is_a_miss_and_its_segments_are_reused(
    open_store, make_handle, layout, data, files
):
    await open_store().put(make_handle(10), is_durable=True)
    files("manifest.json")[0].write_bytes(data)
    store = open_store()

    assert await store.get(KEY, layout) is None
    assert len(await store.adopt_partial(KEY, layout)) == 3


async def test_a_flipped_bit_in_the_keys_is_a_miss(open_store, make_segments, layout, files):
    layout = replace(layout, head_dim=512)
    shape = (2, 2, 1, 4, 512)
    segment = replace(make_segments(4)[0], kv=np.zeros(shape, np.int16))
    handle = StateHandle(
        content_key=KEY, layout=layout, segments=(segment,), num_tokens=4, num_bytes=1
    )
    await open_store().put(handle, is_durable=True)
    _flip_in_keys(files("*.arrow")[0])

    assert await open_store().get(KEY, layout) is None
