"""The services that run on this machine, so that other commands of the same user find them.

Ray's own way to find a cluster takes whatever was started last, also when it is long gone, and then
waits for many minutes.
"""

import contextlib
import os
import socket
import tempfile
from pathlib import Path

_CONNECT_TIMEOUT_S = 2.0


def announce(ray_address: str) -> Path | None:
    """Write down where a service runs; `withdraw` takes it back.

    Returns:
        The note; None where it cannot be written, which only costs being found.
    """
    folder = _folder()
    note = folder / f"{os.getpid()}.ray-address"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_own(folder):
            return None
        note.write_text(ray_address + "\n", encoding="utf-8")
    except OSError:
        return None
    return note


def withdraw(note: Path | None) -> None:
    """Take back what `announce` wrote."""
    if note is not None:
        with contextlib.suppress(OSError):
            note.unlink(missing_ok=True)


def find_services() -> list[str]:
    """Ray addresses of this user's services on this machine that can be reached, sorted."""
    folder = _folder()
    if not _is_own(folder):
        return []
    notes = [note.read_text(encoding="utf-8").strip() for note in folder.glob("*.ray-address")]
    return sorted({address for address in notes if can_reach(address)})


def can_reach(address: str) -> bool:
    """Whether something listens at a `host:port`; a name without a port is left to Ray."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return True
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"orthros-{os.getuid()}"


def _is_own(folder: Path) -> bool:
    """Whether it is a folder that nobody else could have written to."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return folder.is_dir() and status.st_uid == os.getuid() and not status.st_mode & 0o022
