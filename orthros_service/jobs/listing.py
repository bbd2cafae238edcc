"""Find the Parquet files of a job by what they hold, not by what they are called."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from orthros_service.errors import InvalidValueError, NotFoundError

MAGIC = b"PAR1"
ENCRYPTED_MAGIC = b"PARE"
PARQUET_SUFFIXES = (".parquet", ".parq", ".pq")

BadFileReason = Literal[
    "not_parquet", "empty_file", "truncated", "encrypted", "unreadable", "unreadable_name"
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BadFile:
    """A file that was meant as input and cannot be read.

    Args:
        path: Relative to the input folder, with forward slashes.
        reason: One of a closed set, for programs.
        message: The same for people.
    """

    path: str
    reason: BadFileReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What lies under the input path.

    Args:
        root: Folder that the paths are relative to, absolute.
        paths: Files with Parquet's magic bytes at both ends, in order of their names.
        bad_files: Files that look meant as Parquet and are not.
        num_skipped: Hidden files and files of other kinds.
    """

    root: str
    paths: tuple[str, ...]
    bad_files: tuple[BadFile, ...]
    num_skipped: int


def list_input(path: str) -> Listing:
    """List one file, or every Parquet file at any depth of a folder.

    A name that starts with `_` or `.` hides itself and all below it, as for every other reader of
    such folders (`_SUCCESS`, `_temporary/`, `.part.crc`). The given path itself is never hidden.

    Raises:
        NotFoundError: Nothing exists at the path.
        InvalidValueError: The path is a URI; this form reads local files.
    """
    if "://" in path:
        raise InvalidValueError(f"The input {path!r} is a URI; give the path of a local file.")
    given = Path(path).absolute()
    if given.is_file():
        return _classify(str(given.parent), [given.name], num_hidden=0, is_given=True)
    if not given.is_dir():
        raise NotFoundError(f"There is no file or folder at {path!r}; check --input.")
    visible, num_hidden = [], 0
    for relative in _walk(given):
        if _is_hidden(relative):
            num_hidden += 1
        else:
            visible.append(relative)
    return _classify(str(given), sorted(visible), num_hidden=num_hidden, is_given=False)


def _walk(root: Path) -> Iterator[str]:
    """Yield the files below a folder, relative; links to folders are followed, each folder once."""
    seen: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_refuse_folder):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders.sort()
        relative = Path(folder).relative_to(root)
        yield from ((relative / name).as_posix() for name in names)


def _refuse_folder(error: OSError) -> None:
    # Going on would leave out its files without a word.
    raise InvalidValueError(f"The folder {error.filename!r} cannot be listed ({error.strerror}).")


def _is_hidden(relative: str) -> bool:
    return any(part.startswith(("_", ".")) for part in PurePosixPath(relative).parts)


def _classify(root: str, relatives: list[str], *, num_hidden: int, is_given: bool) -> Listing:
    paths, bad_files, num_skipped = [], [], num_hidden
    for relative in relatives:
        problem = _inspect(Path(root) / relative, relative)
        if problem is None:
            paths.append(relative)
        elif is_given or _looks_meant(relative) or problem.reason != "not_parquet":
            bad_files.append(problem)
        else:
            num_skipped += 1
    return Listing(
        root=root, paths=tuple(paths), bad_files=tuple(bad_files), num_skipped=num_skipped
    )


def _looks_meant(relative: str) -> bool:
    return relative.lower().endswith(PARQUET_SUFFIXES)


def _inspect(path: Path, relative: str) -> BadFile | None:
    """Say what is wrong with a file's ends; None when both carry the magic bytes."""
    try:
        relative.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(relative).decode("utf-8", "replace")
        return _bad(shown, "unreadable_name", "its name is not UTF-8; rename it")
    if not path.is_file():
        return _bad(relative, "not_parquet", "it is no regular file, or a link to nothing")
    try:
        head, tail = _read_ends(path)
    except OSError as error:
        return _bad(relative, "unreadable", f"it cannot be opened ({error.strerror})")
    if not head:
        is_meant = _looks_meant(relative)
        return _bad(relative, "empty_file" if is_meant else "not_parquet", "it has no bytes")
    if ENCRYPTED_MAGIC in (head, tail) and {head, tail} <= {MAGIC, ENCRYPTED_MAGIC}:
        return _bad(relative, "encrypted", "its footer is encrypted; decrypt it first")
    if head != MAGIC:
        return _bad(relative, "not_parquet", "it does not start with Parquet's magic bytes PAR1")
    if tail != MAGIC:
        return _bad(relative, "truncated", "it starts as Parquet and has no footer; copy it again")
    return None


def _read_ends(path: Path) -> tuple[bytes, bytes]:
    with path.open("rb") as file:
        head = file.read(4)
        size = file.seek(0, os.SEEK_END)
        if size < 12:
            # Too short for magic, length and magic: nothing can follow the head.
            return head, b""
        file.seek(size - 4)
        return head, file.read(4)


def _bad(path: str, reason: BadFileReason, message: str) -> BadFile:
    return BadFile(path=path, reason=reason, message=f"{path}: {message}.")
