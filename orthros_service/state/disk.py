"""The disk tier of states: Arrow files in a pyarrow filesystem, local or an object store.

`<root>/<content_key>/<layout digest>/NNNNNN.arrow` per segment, and `manifest.json` last: a state
without a manifest is unfinished. Every file appears at once, by a rename. All calls block.
"""

import contextlib
import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.fs

from orthros_service.errors import InvalidValueError, StateCorruptedError, StateError
from orthros_service.state.arrow import read_layout, read_segment, write_segment
from orthros_service.state.types import AttentionState, Segment, StateLayout

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """What the disk tier holds: bytes of segment files and finished states."""

    num_bytes: int
    num_states: int


class DiskTier:
    """Reads and writes states as files.

    Args:
        uri: Folder or pyarrow filesystem URI; it is created on the first write.
        header_ids: Token ids that every document begins with; part of the layout digest, so that
            states made with another header are never found.

    Raises:
        InvalidValueError: pyarrow knows no such filesystem.
    """

    def __init__(self, uri: str, *, header_ids: Iterable[int] = ()) -> None:
        try:
            filesystem, root = (
                pa.fs.FileSystem.from_uri(uri)
                if ":" in uri
                else (pa.fs.LocalFileSystem(), str(Path(uri).absolute()))
            )
        except (pa.ArrowException, OSError) as error:
            raise InvalidValueError(
                f"state.uri {uri!r} is neither a folder nor a pyarrow filesystem URI: {error}"
            ) from error
        self._filesystem: pa.fs.FileSystem = filesystem
        self._root: str = root
        self._header_ids = [int(token_id) for token_id in header_ids]

    def write_segment(
        self, content_key: str, layout: StateLayout, index: int, segment: Segment
    ) -> None:
        """Write one segment file.

        Raises:
            OSError: The disk is full or cannot be reached; no partial file is left.
        """
        self._write(
            self._segment_path(content_key, layout, index),
            lambda sink: write_segment(segment, layout=layout, content_key=content_key, sink=sink),
        )

    def write_manifest(
        self, content_key: str, layout: StateLayout, *, num_segments: int, num_tokens: int
    ) -> None:
        """Mark a state as complete; every segment must have been written before.

        Raises:
            OSError: The disk is full or cannot be reached.
        """
        manifest = {
            "layout": asdict(layout),
            "num_segments": num_segments,
            "num_tokens": num_tokens,
        }
        data = json.dumps(manifest, sort_keys=True).encode()
        self._write(
            f"{self._state_path(content_key, layout)}/{MANIFEST}", lambda sink: sink.write(data)
        )

    def has_manifest(self, content_key: str, layout: StateLayout) -> bool:
        """Whether a finished state of this content is stored."""
        path = f"{self._state_path(content_key, layout)}/{MANIFEST}"
        return bool(self._filesystem.get_file_info(path).is_file)

    def read_state(self, content_key: str, expected: StateLayout) -> AttentionState | None:
        """Read a finished state; `expected.mode` is ignored, the stored one is returned.

        A state that is damaged or of another layout counts as absent and is deleted from its first
        bad file on, with a warning; its good leading segments stay for `read_partial`.

        Raises:
            OSError: The disk cannot be read; nothing is deleted.
        """
        path = f"{self._state_path(content_key, expected)}/{MANIFEST}"
        try:
            with self._filesystem.open_input_stream(path) as source:
                data = source.read()
        except FileNotFoundError:
            return None
        try:
            layout, num_segments, num_tokens = _parse_manifest(data)
            layout.check_matches(expected)
            segments = self._read_segments(content_key, layout, num_segments)
            state = AttentionState(layout=layout, segments=tuple(segments))
            if (len(segments), state.num_tokens) != (num_segments, num_tokens):
                raise StateCorruptedError(
                    f"{len(segments)} of {num_segments} segments are good, with "
                    f"{state.num_tokens} of {num_tokens} tokens."
                )
        except StateError as error:
            logger.warning("state %s: manifest deleted: %s", content_key[:12], error)
            self._delete_file(path)
            return None
        return state

    def read_partial(self, content_key: str, layout: StateLayout) -> list[Segment]:
        """Read the good leading segments of an unfinished state; `layout.mode` counts here.

        Raises:
            OSError: The disk cannot be read; nothing is deleted.
        """
        folder = self._state_path(content_key, layout)
        names = self._list_names(folder)
        for name in names:
            if name.endswith(".tmp"):
                self._delete_file(f"{folder}/{name}")
        num_segments = 0
        while _segment_name(num_segments) in names:
            num_segments += 1
        return self._read_segments(content_key, layout, num_segments)

    def delete(self, content_key: str) -> None:
        """Delete everything stored for a content, of every layout; absent content is ignored.

        Raises:
            OSError: The files cannot be deleted.
        """
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.delete_dir(f"{self._root}/{content_key}")

    def usage(self) -> DiskUsage:
        """Count what is stored, by listing it.

        Raises:
            OSError: The folder cannot be listed.
        """
        selector = pa.fs.FileSelector(self._root, allow_not_found=True, recursive=True)
        files = [info for info in self._filesystem.get_file_info(selector) if info.is_file]
        return DiskUsage(
            num_bytes=sum(info.size for info in files if info.extension == "arrow"),
            num_states=sum(info.base_name == MANIFEST for info in files),
        )

    def _read_segments(
        self, content_key: str, layout: StateLayout, num_segments: int
    ) -> list[Segment]:
        """Read leading segments up to the first bad one, which is deleted with all after it."""
        segments: list[Segment] = []
        position = 0
        for index in range(num_segments):
            try:
                source = self._open(self._segment_path(content_key, layout, index))
                segment = read_segment(source, layout=layout, content_key=content_key)
                if segment.start != position:
                    raise StateCorruptedError(
                        f"The segment begins at token {segment.start}, {position} was expected."
                    )
            except (StateError, FileNotFoundError) as error:
                logger.warning(
                    "state %s: segments from %d on deleted: %s", content_key[:12], index, error
                )
                self._delete_segments_from(self._state_path(content_key, layout), index)
                break
            segments.append(segment)
            position = segment.end
        return segments

    def _open(self, path: str) -> pa.NativeFile | pa.Buffer:
        # A memory map is not copied, and stays readable after the file is deleted or replaced.
        if isinstance(self._filesystem, pa.fs.LocalFileSystem):
            return pa.memory_map(path, "r")
        with self._filesystem.open_input_file(path) as source:
            return source.read_buffer()

    def _list_names(self, folder: str) -> set[str]:
        selector = pa.fs.FileSelector(folder, allow_not_found=True)
        return {info.base_name for info in self._filesystem.get_file_info(selector)}

    def _delete_segments_from(self, folder: str, index: int) -> None:
        for name in self._list_names(folder):
            if name.endswith(".arrow") and name >= _segment_name(index):
                self._delete_file(f"{folder}/{name}")

    def _write(self, path: str, write: Callable[[pa.NativeFile], object]) -> None:
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        self._filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
        try:
            with self._filesystem.open_output_stream(temporary) as sink:
                write(sink)
            self._filesystem.move(temporary, path)
        except Exception:
            self._delete_file(temporary)
            raise

    def _delete_file(self, path: str) -> None:
        try:
            self._filesystem.delete_file(path)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("stored state file %s cannot be deleted: %s", path, error)

    def _state_path(self, content_key: str, layout: StateLayout) -> str:
        # The mode is a property of the document and must not be known to find its state.
        identity = asdict(replace(layout, mode="full")) | {"header_ids": self._header_ids}
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return f"{self._root}/{content_key}/{digest[:16]}"

    def _segment_path(self, content_key: str, layout: StateLayout, index: int) -> str:
        return f"{self._state_path(content_key, layout)}/{_segment_name(index)}"


def _segment_name(index: int) -> str:
    return f"{index:06d}.arrow"


def _parse_manifest(data: bytes) -> tuple[StateLayout, int, int]:
    try:
        fields = json.loads(data)
        num_segments, num_tokens = fields["num_segments"], fields["num_tokens"]
        layout_fields = fields["layout"]
    except (ValueError, KeyError, TypeError) as error:
        raise StateCorruptedError("The manifest cannot be read. Prefill again.") from error
    if type(num_segments) is not int or type(num_tokens) is not int:
        raise StateCorruptedError("The manifest's counts are not integers. Prefill again.")
    return read_layout(layout_fields), num_segments, num_tokens
