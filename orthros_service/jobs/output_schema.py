"""What an output folder looks like: the columns that a job adds to its input's, and its files."""

from typing import Any

import pyarrow as pa

JOB_FOLDER = "_job"
SUCCESS_FILE = "_SUCCESS"

CITATION = pa.struct(
    [
        pa.field("start_char", pa.int64()),
        pa.field("end_char", pa.int64()),
        pa.field("quote", pa.large_string()),
    ]
)

IDENTITY_COLUMNS = pa.schema(
    [
        pa.field("_source_file", pa.string()),
        pa.field("_source_row", pa.int64()),
    ]
)

RESULT_COLUMNS = pa.schema(
    [
        pa.field("status", pa.string()),
        pa.field("answer", pa.large_string()),
        pa.field("finish_reason", pa.string()),
        pa.field("error_code", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("document_tokens", pa.int64()),
        pa.field("prompt_tokens", pa.int64()),
        pa.field("completion_tokens", pa.int64()),
        pa.field("citations", pa.list_(CITATION)),
        pa.field("queue_s", pa.float64()),
        pa.field("prefill_s", pa.float64()),
        pa.field("decode_s", pa.float64()),
        pa.field("total_s", pa.float64()),
        pa.field("model", pa.string()),
        pa.field("converted", pa.bool_()),
    ]
)

ADDED_COLUMNS = pa.unify_schemas([IDENTITY_COLUMNS, RESULT_COLUMNS])


def build_output_schema(input_schema: Any) -> Any:
    """Return the `pa.Schema` of every output file: the input's columns as they are, then ours."""
    return pa.schema([*input_schema, *ADDED_COLUMNS], metadata=input_schema.metadata)
