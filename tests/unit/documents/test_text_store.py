import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from orthros_service.documents import TextStore, content_key
from orthros_service.errors import (
    DocumentCorruptedError,
    InvalidValueError,
    NotFoundError,
    UnavailableError,
)

TEXT = "où est la clé?\n鍵 😀"
KEY = content_key(TEXT, "auto")


@pytest.fixture
def store(tmp_path):
    return TextStore(str(tmp_path / "texts"))


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    mode=st.sampled_from(["auto", "full", "linear"]),
)
def test_a_text_comes_back_as_it_was_stored(tmp_path, text, mode):
    store = TextStore(str(tmp_path / "texts"))
    key = content_key(text, mode)
    store.put(key, text)
    assert store.get(key) == text


def test_the_same_content_twice_is_one_file(store, tmp_path):
    store.put(KEY, TEXT)
    store.put(KEY, TEXT)
    assert [path.name for path in (tmp_path / "texts").iterdir()] == [f"{KEY}.txt"]
    assert (tmp_path / "texts" / f"{KEY}.txt").read_bytes() == TEXT.encode()


def test_another_store_on_the_same_folder_sees_the_text(store, tmp_path):
    store.put(KEY, TEXT)
    assert TextStore((tmp_path / "texts").as_uri()).get(KEY) == TEXT


def test_a_relative_folder_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TextStore("data/texts").put(KEY, TEXT)
    assert (tmp_path / "data" / "texts" / f"{KEY}.txt").exists()


def test_a_folder_may_have_any_name(tmp_path):
    store = TextStore(str(tmp_path / "my texts % é #1"))
    store.put(KEY, TEXT)
    assert store.get(KEY) == TEXT
    assert (tmp_path / "my texts % é #1" / f"{KEY}.txt").exists()


def test_any_pyarrow_filesystem_will_do():
    store = TextStore("mock:///bucket/texts")
    store.put(KEY, TEXT)
    assert store.get(KEY) == TEXT
    store.delete(KEY)
    with pytest.raises(NotFoundError):
        store.get(KEY)


def test_a_deleted_text_is_gone_and_deleting_again_is_harmless(store):
    store.put(KEY, TEXT)
    store.delete(KEY)
    store.delete(KEY)
    with pytest.raises(NotFoundError):
        store.get(KEY)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:-5],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: data.replace(b"est", b"EST"),
        lambda data: b"\xff" + data[1:],
    ],
)
def test_a_damaged_file_is_noticed(store, tmp_path, damage):
    store.put(KEY, TEXT)
    path = tmp_path / "texts" / f"{KEY}.txt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DocumentCorruptedError) as caught:
        store.get(KEY)
    assert caught.value.details == {"content_key": KEY}
    store.put(KEY, TEXT)
    assert store.get(KEY) == TEXT


@pytest.mark.parametrize(
    "key", ["", "../../etc/passwd", "/etc/passwd", KEY.upper(), KEY[:-1], KEY + "\n", "g" * 64]
)
def test_a_key_that_is_no_digest_is_refused(store, key):
    for call in (lambda: store.get(key), lambda: store.put(key, TEXT), lambda: store.delete(key)):
        with pytest.raises(InvalidValueError, match="64 hexadecimal digits"):
            call()


def test_a_text_under_another_ones_key_is_refused(store):
    with pytest.raises(InvalidValueError, match="does not belong"):
        store.put(KEY, "another text")
    with pytest.raises(NotFoundError):
        store.get(KEY)


def test_a_failed_write_leaves_nothing_behind_and_only_the_log_says_where(
    store, tmp_path, monkeypatch, caplog
):
    class FullDisk:
        def __getattr__(self, name):
            return getattr(real, name)

        def move(self, *_):
            raise OSError(28, "No space left on device")

    real = store._filesystem
    monkeypatch.setattr(store, "_filesystem", FullDisk())
    with pytest.raises(UnavailableError, match="cannot be written to") as caught:
        store.put(KEY, TEXT)
    assert str(tmp_path) not in caught.value.message
    assert str(tmp_path) in caplog.text
    assert "No space left" in caplog.text
    assert list((tmp_path / "texts").iterdir()) == []


def test_readers_see_the_whole_text_or_none_while_it_is_written(store):
    text = "line\n" * 200_000
    key = content_key(text, "auto")
    is_done = threading.Event()

    def write():
        for _ in range(20):
            store.put(key, text)
        is_done.set()

    writer = threading.Thread(target=write)
    writer.start()
    num_reads = 0
    while not (is_done.is_set() and num_reads):
        try:
            assert store.get(key) == text
        except NotFoundError:
            continue
        num_reads += 1
    writer.join()


@pytest.mark.parametrize("uri", ["nosuch://bucket/x", "://"])
def test_a_uri_that_no_filesystem_knows_is_refused(uri):
    with pytest.raises(InvalidValueError, match="no URI that pyarrow knows"):
        TextStore(uri)


def test_a_folder_that_cannot_be_made_is_unavailable(tmp_path):
    Path(tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="cannot be opened"):
        TextStore(str(tmp_path / "file" / "texts"))


def test_an_unreadable_path_is_unavailable(store, tmp_path):
    (tmp_path / "texts" / f"{KEY}.txt").mkdir()
    with pytest.raises(UnavailableError, match="cannot be read"):
        store.get(KEY)


def test_the_store_works_inside_a_subtree(tmp_path):
    inner = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    store = TextStore(str(tmp_path / "a"))
    store.put(KEY, TEXT)
    assert inner.get_file_info(f"a/{KEY}.txt").size == len(TEXT.encode())
