"""Input files are found by what they hold, hidden ones are left alone, bad ones are named."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orthros_service.errors import InvalidValueError, NotFoundError
from orthros_service.jobs.listing import list_input

TABLE = pa.table({"text": ["x"]})


def _write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(TABLE, path)


def _reasons(path: Path) -> dict[str, str]:
    return {bad.path: bad.reason for bad in list_input(str(path)).bad_files}


def test_a_name_with_a_hidden_prefix_hides_all_below_it_at_any_depth(tmp_path):
    _write(tmp_path, "y=1/a.parquet", "b.parquet")
    hidden = (
        "y=1/_temporary/0/b.parquet",
        "y=1/._c.parquet",
        "_temporary/z.parquet",
        ".x/y.parquet",
    )
    _write(tmp_path, *hidden)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".b.parquet.crc").write_text("z")

    listing = list_input(str(tmp_path))

    assert listing.paths == ("b.parquet", "y=1/a.parquet")
    assert listing.num_skipped == 6
    assert listing.bad_files == ()


def test_the_given_folder_or_file_is_never_hidden_itself(tmp_path):
    _write(tmp_path, "_out/.x/_a.parquet")

    listing = list_input(str(tmp_path / "_out" / ".x" / "_a.parquet"))
    assert listing.paths == ("_a.parquet",)
    assert list_input(str(tmp_path / "_out" / ".x")).paths == ()
    _write(tmp_path, "_out/.x/b")
    assert list_input(str(tmp_path / "_out" / ".x")).paths == ("b",)


def test_parquet_is_known_by_its_magic_bytes_not_by_its_name(tmp_path):
    _write(tmp_path, "part-00000", "a.parq", "B.PARQUET", "c.snappy")
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "empty.txt").touch()

    listing = list_input(str(tmp_path))

    assert listing.paths == ("B.PARQUET", "a.parq", "c.snappy", "part-00000")
    assert listing.num_skipped == 2


def test_files_that_are_meant_as_parquet_and_are_not_are_bad_files_with_a_reason(tmp_path):
    _write(tmp_path, "good.parquet")
    data = (tmp_path / "good.parquet").read_bytes()
    (tmp_path / "garbage.parquet").write_text("not parquet at all" * 10)
    (tmp_path / "half.bin").write_bytes(data[: len(data) // 2])
    (tmp_path / "magic.bin").write_bytes(b"PAR1")
    (tmp_path / "zero.parquet").touch()
    (tmp_path / "locked").write_bytes(data[:-4] + b"PARE")
    (tmp_path / "locked2").write_bytes(b"PARE" + data[4:-4] + b"PARE")
    (tmp_path / "dangling.parquet").symlink_to(tmp_path / "gone")

    assert list_input(str(tmp_path)).paths == ("good.parquet",)
    assert _reasons(tmp_path) == {
        "garbage.parquet": "not_parquet",
        "half.bin": "truncated",
        "magic.bin": "truncated",
        "zero.parquet": "empty_file",
        "locked": "encrypted",
        "locked2": "encrypted",
        "dangling.parquet": "not_parquet",
    }


def test_a_single_file_of_another_kind_is_a_bad_file(tmp_path):
    (tmp_path / "notes.txt").write_text("hello, this is text")

    assert _reasons(tmp_path / "notes.txt") == {"notes.txt": "not_parquet"}


def test_names_are_kept_byte_for_byte(tmp_path):
    names = [
        f"{name}/f.parquet"
        for name in ("sp ace", "per%20cent", "co:lon", "ha#sh", "q?m", "semi;x", "uni文", "br[a]ck")
    ]
    _write(tmp_path, *names)

    assert set(list_input(str(tmp_path)).paths) == set(names)


def test_a_name_that_is_not_utf8_is_a_bad_file_since_no_string_can_hold_it(tmp_path):
    _write(tmp_path, "good.parquet")
    (tmp_path / "good.parquet").rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet"))

    assert _reasons(tmp_path) == {"\ufffd.parquet": "unreadable_name"}


def test_a_loop_of_links_is_walked_once(tmp_path):
    _write(tmp_path, "sub/a.parquet")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)

    assert list_input(str(tmp_path)).paths == ("sub/a.parquet",)


def test_links_to_files_and_folders_elsewhere_are_followed(tmp_path):
    _write(tmp_path, "store/blob", "store2/b.parquet")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.parquet").symlink_to(tmp_path / "store" / "blob")
    (tmp_path / "in" / "more").symlink_to(tmp_path / "store2")

    assert list_input(str(tmp_path / "in")).paths == ("a.parquet", "more/b.parquet")


def test_a_pipe_is_skipped_and_never_opened(tmp_path):
    _write(tmp_path, "a.parquet")
    os.mkfifo(tmp_path / "pipe")

    assert list_input(str(tmp_path)).paths == ("a.parquet",)


def test_a_missing_input_and_a_uri_are_refused(tmp_path):
    with pytest.raises(NotFoundError, match="gone"):
        list_input(str(tmp_path / "gone"))
    with pytest.raises(InvalidValueError, match="URI"):
        list_input("s3://bucket/data")
