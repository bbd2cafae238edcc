"""The texts themselves: UTF-8 files in a pyarrow filesystem, named by their content."""

import logging
import re
import uuid
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from orthros_service.documents.text import content_key as key_of
from orthros_service.errors import (
    DocumentCorruptedError,
    InvalidValueError,
    NotFoundError,
    UnavailableError,
)
from orthros_service.types import PrefillModeChoice

logger = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")
_MODES: tuple[PrefillModeChoice, ...] = ("auto", "full", "linear")


class TextStore:
    """One file per content key. Synchronous and thread-safe; several processes may share it.

    A file's name is the digest of its content, so a truncated or altered file is noticed on
    reading. Files appear whole or not at all.

    Args:
        uri: A folder, absolute or relative to the working directory, or a URI that pyarrow knows,
            such as s3://bucket/folder.

    Raises:
        InvalidValueError: The URI names no filesystem that pyarrow knows.
        UnavailableError: The folder cannot be created. Every method may raise this too.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        try:
            location = uri if "://" in uri else str(Path(uri).absolute())
            self._filesystem, self._root = fs.FileSystem.from_uri(location)
            self._filesystem.create_dir(self._root, recursive=True)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InvalidValueError(
                f"The text store {uri!r} is no folder and no URI that pyarrow knows: {error}"
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"The text store {uri} cannot be opened: {error}. See that it is reachable, "
                "writable and has space."
            ) from error

    def put(self, content_key: str, text: str) -> None:
        """Store a text; storing the same content again is harmless.

        Args:
            content_key: `content_key(text, mode)`.
            text: The normalized text.

        Raises:
            InvalidValueError: The key is not the text's.
        """
        path = self._path(content_key)
        if not _is_content(content_key, text):
            raise InvalidValueError("The content key does not belong to this text.")
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            with self._filesystem.open_output_stream(temporary) as stream:
                stream.write(text.encode())
            self._filesystem.move(temporary, path)
        except OSError as error:
            self._remove_quietly(temporary)
            raise self._unavailable("written to", error) from error

    def get(self, content_key: str) -> str:
        """Read a text.

        Raises:
            NotFoundError: There is no text of this key.
            DocumentCorruptedError: The file is not what was stored.
        """
        path = self._path(content_key)
        try:
            with self._filesystem.open_input_stream(path) as stream:
                data = stream.read()
        except FileNotFoundError as error:
            raise NotFoundError(
                "The document's text is not in the text store; upload the document again."
            ) from error
        except OSError as error:
            raise self._unavailable("read", error) from error
        try:
            text = str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise _corrupted(content_key) from error
        if not _is_content(content_key, text):
            raise _corrupted(content_key)
        return text

    def delete(self, content_key: str) -> None:
        """Remove a text; removing one that is not there is harmless."""
        path = self._path(content_key)
        try:
            self._filesystem.delete_file(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unavailable("deleted from", error) from error

    def _path(self, content_key: str) -> str:
        if not _KEY.fullmatch(content_key):
            raise InvalidValueError("A content key has 64 hexadecimal digits, in lower case.")
        return f"{self._root}/{content_key}.txt"

    def _remove_quietly(self, path: str) -> None:
        try:
            self._filesystem.delete_file(path)
        except OSError:
            logger.debug("A temporary file in the text store could not be removed")

    def _unavailable(self, verb: str, error: OSError) -> UnavailableError:
        logger.warning("The text store %s cannot be %s: %s", self._uri, verb, error)
        # Callers over the network see this: where the texts are, is not their business.
        return UnavailableError(
            f"The text store cannot be {verb} at the moment; send the request again."
        )


def _is_content(content_key: str, text: str) -> bool:
    return any(key_of(text, mode) == content_key for mode in _MODES)


def _corrupted(content_key: str) -> DocumentCorruptedError:
    return DocumentCorruptedError(
        "The document's stored text is not what was uploaded: the file was cut or changed. Delete "
        "the document and upload it again.",
        content_key=content_key,
    )
