"""Files that grew apart get one schema by lossless casts, or are refused by name."""

import pyarrow as pa
import pytest

from orthros_service.errors import InvalidValueError
from orthros_service.jobs.schemas import cast_table, unify

DICTIONARY = pa.dictionary(pa.int32(), pa.string())


def _unify(one, other):
    for order in ((one, other), (other, one)):
        schemas = {str(index): pa.schema([("v", each)]) for index, each in enumerate(order)}
        yield unify(schemas).field("v").type


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (pa.string(), pa.string(), pa.string()),
        (DICTIONARY, DICTIONARY, DICTIONARY),
        (pa.null(), pa.string(), pa.string()),
        (pa.null(), DICTIONARY, DICTIONARY),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.string(), DICTIONARY, pa.large_string()),
        (pa.int8(), pa.dictionary(pa.int8(), pa.int64()), pa.int64()),
        (pa.dictionary(pa.int8(), pa.string()), DICTIONARY, pa.large_string()),
        (pa.string_view(), pa.string(), pa.large_string()),
        (pa.string(), pa.binary(), pa.large_binary()),
        (pa.binary(4), pa.large_binary(), pa.large_binary()),
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.uint8(), pa.int8(), pa.int16()),
        (pa.uint32(), pa.int64(), pa.int64()),
        (pa.int32(), pa.float32(), pa.float64()),
        (pa.int8(), pa.float32(), pa.float32()),
        (pa.float16(), pa.float64(), pa.float64()),
        (pa.decimal128(10, 2), pa.decimal128(12, 4), pa.decimal128(12, 4)),
        (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.date32(), pa.date64(), pa.date64()),
        (pa.list_(pa.null()), pa.list_(pa.string()), pa.list_(pa.string())),
        (pa.list_(pa.string()), pa.large_list(pa.string()), pa.large_list(pa.string())),
        (
            pa.map_(pa.string(), pa.int8()),
            pa.map_(pa.string(), pa.int32()),
            pa.map_(pa.string(), pa.int32()),
        ),
    ],
)
def test_types_that_share_a_lossless_type_become_it_in_either_order(one, other, common):
    assert list(_unify(one, other)) == [common, common]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.int64(), pa.string()),
        (pa.int64(), pa.float64()),
        (pa.uint64(), pa.int64()),
        (pa.bool_(), pa.int8()),
        (pa.timestamp("s"), pa.timestamp("s", "UTC")),
        (pa.list_(pa.string()), pa.string()),
        (pa.struct([("a", pa.int8())]), pa.string()),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.string())])),
    ],
)
def test_types_without_a_lossless_type_are_refused_with_both_files_named(one, other):
    schemas = {
        "first.parquet": pa.schema([("v", one)]),
        "second.parquet": pa.schema([("v", other)]),
    }

    with pytest.raises(InvalidValueError, match=r"'v'.*first\.parquet.*second\.parquet"):
        unify(schemas)


def test_struct_fields_are_united_and_absent_ones_become_null():
    one = pa.table({"s": [{"a": 1}]})
    other = pa.table({"s": [{"b": "x", "a": 2}]})

    schema = unify({"one": one.schema, "other": other.schema})
    tables = [cast_table(table, schema) for table in (one, other)]

    assert pa.concat_tables(tables).to_pylist() == [
        {"s": {"a": 1, "b": None}},
        {"s": {"a": 2, "b": "x"}},
    ]


def test_absent_and_reordered_columns_come_out_in_the_order_of_first_appearance():
    tables = [
        pa.table({"id": ["a"], "text": ["x"]}),
        pa.table({"extra": [1], "text": pa.array(["z"]).dictionary_encode(), "id": ["c"]}),
    ]

    schema = unify({str(index): table.schema for index, table in enumerate(tables)})
    rows = pa.concat_tables([cast_table(table, schema) for table in tables]).to_pylist()

    assert schema.names == ["id", "text", "extra"]
    assert rows == [
        {"id": "a", "text": "x", "extra": None},
        {"id": "c", "text": "z", "extra": 1},
    ]


def test_metadata_that_files_agree_on_is_kept_and_pandas_own_is_not():
    one = pa.schema([("v", pa.int8())], metadata={"geo": "g", "pandas": "p", "run": "1"})
    other = pa.schema([("v", pa.int8())], metadata={"geo": "g", "pandas": "p", "run": "2"})

    assert unify({"one": one, "other": other}).metadata == {b"geo": b"g"}
