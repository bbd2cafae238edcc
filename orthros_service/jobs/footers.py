"""What the footers of the input files say, read side by side."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from orthros_service.jobs.listing import BadFile

NUM_THREADS = 8
# Arrow reports damaged bytes by any of these.
PARQUET_ERRORS = (OSError, ValueError, TypeError, NotImplementedError, pa.ArrowException)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One readable input file.

    Args:
        path: Relative to the input folder.
        num_rows: Rows of the whole file.
        row_groups: (rows, uncompressed bytes) of each row group.
        schema: Its `pa.Schema`.
    """

    path: str
    num_rows: int
    row_groups: tuple[tuple[int, int], ...]
    schema: Any


def read_footers(root: str, paths: tuple[str, ...]) -> tuple[list[InputFile], list[BadFile]]:
    """Read every footer; files whose footer is damaged come back as bad files."""

    def read(path: str) -> InputFile | BadFile:
        return _read_footer(root, path)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        results = list(pool.map(read, paths))
    files = [each for each in results if isinstance(each, InputFile)]
    return files, [each for each in results if isinstance(each, BadFile)]


def _read_footer(root: str, path: str) -> InputFile | BadFile:
    try:
        with pq.ParquetFile(str(Path(root) / path)) as file:
            metadata, schema = file.metadata, file.schema_arrow
            # Their codecs stay unasked: an unknown one ends the process there, and is a plain error
            # when its pages are read.
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    except PARQUET_ERRORS as error:
        cause = " ".join(str(error).split())
        message = f"{path}: its footer cannot be read ({cause})."
        return BadFile(path=path, reason="unreadable", message=message)
    sizes = tuple((group.num_rows, max(0, group.total_byte_size)) for group in groups)
    if any(rows < 0 for rows, _ in sizes):
        message = f"{path}: its footer names a negative number of rows."
        return BadFile(path=path, reason="unreadable", message=message)
    # Some writers leave the file's own count at zero; the row groups' are what readers go by.
    num_rows = sum(rows for rows, _ in sizes)
    return InputFile(path=path, num_rows=num_rows, row_groups=sizes, schema=schema)
