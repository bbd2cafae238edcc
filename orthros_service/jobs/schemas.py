"""One schema for files that grew apart, by casts that lose nothing."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from orthros_service.errors import InvalidValueError

_INTEGER_BY_BITS = {
    True: {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()},
    False: {8: pa.uint8(), 16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()},
}
_FLOAT_BY_BITS = {16: pa.float16(), 32: pa.float32(), 64: pa.float64()}
# Widest integer that a float holds exactly, in bits.
_EXACT_BITS = {16: 8, 32: 16, 64: 32}


class TypeClashError(Exception):
    """Two types have no common type that keeps every value of both."""


def is_text(data_type: Any) -> bool:
    """Whether values of this type can be a document: a string, or bytes that may be UTF-8."""
    if pa.types.is_dictionary(data_type):
        return is_text(data_type.value_type)
    return _is_string(data_type) or _is_bytes(data_type)


def unify(schemas: Mapping[str, Any]) -> Any:
    """Find one schema for several files; columns are matched by name, in order of appearance.

    Args:
        schemas: File names to their `pa.Schema`; not empty.

    Returns:
        A `pa.Schema` with nullable columns, since a file may lack one.

    Raises:
        InvalidValueError: A column has types without a lossless common type; both files are named.
    """
    fields: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for file, schema in schemas.items():
        for field in schema:
            known = fields.setdefault(field.name, field.with_nullable(True))
            first = origins.setdefault(field.name, file)
            try:
                fields[field.name] = known.with_type(common_type(known.type, field.type))
            except TypeClashError as error:
                raise InvalidValueError(
                    f"Column {field.name!r} is {known.type} in {first} and {field.type} in {file}, "
                    "and no type keeps the values of both; cast one of the files, or run them as "
                    "two jobs.",
                    column=field.name,
                ) from error
    return pa.schema(list(fields.values()), metadata=_common_metadata(schemas.values()))


def common_type(one: Any, other: Any) -> Any:
    """Return the type that holds every value of both types.

    Raises:
        TypeClashError: There is none.
    """
    if one.equals(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_null(other):
        return one
    for rule in (_common_text, _common_number, _common_nested):
        found = rule(one, other)
        if found is not None:
            return found
    return _common_promoted(one, other)


def cast_table(table: Any, schema: Any) -> Any:
    """Give a table the columns and types of a schema; absent columns become nulls.

    Raises:
        pyarrow.ArrowInvalid: A value does not fit, which `unify` rules out for its own schemas
            except for strings that are not UTF-8.
    """
    columns = []
    for field in schema:
        index = table.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.nulls(table.num_rows, field.type))
        else:
            columns.append(_cast(table.column(index), field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def decode_dictionary(column: Any) -> Any:
    """Replace dictionary codes by their values; other columns pass unchanged."""
    if not pa.types.is_dictionary(column.type):
        return column
    if isinstance(column, pa.ChunkedArray):
        chunks = [chunk.dictionary_decode() for chunk in column.chunks]
        return pa.chunked_array(chunks, type=column.type.value_type)
    return column.dictionary_decode()


def _cast(column: Any, data_type: Any) -> Any:
    if column.type.equals(data_type):
        return column
    if pa.types.is_dictionary(column.type) and not pa.types.is_dictionary(data_type):
        column = decode_dictionary(column)
    return column.cast(data_type)


def _common_text(one: Any, other: Any) -> Any:
    values = [each.value_type if pa.types.is_dictionary(each) else each for each in (one, other)]
    if all(_is_string(each) for each in values):
        return pa.large_string()
    if all(is_text(each) for each in values):
        return pa.large_binary()
    has_dictionary = values != [one, other]
    return common_type(*values) if has_dictionary else None


def _common_number(one: Any, other: Any) -> Any:
    integers = [each for each in (one, other) if pa.types.is_integer(each)]
    floats = [each for each in (one, other) if pa.types.is_floating(each)]
    if len(integers) + len(floats) != 2:
        return None
    if not integers:
        return max(floats, key=lambda each: each.bit_width)
    if not floats:
        return _common_integer(one, other)
    (integer,), (real,) = integers, floats
    for bits, wide in _FLOAT_BY_BITS.items():
        if bits >= real.bit_width and _EXACT_BITS[bits] >= integer.bit_width:
            return wide
    raise TypeClashError


def _common_integer(one: Any, other: Any) -> Any:
    signs = [pa.types.is_signed_integer(each) for each in (one, other)]
    # An unsigned value needs one bit more in a signed type, so the next width.
    needed = [
        each.bit_width * (2 if not is_signed and any(signs) else 1)
        for each, is_signed in zip((one, other), signs, strict=True)
    ]
    found = _INTEGER_BY_BITS[any(signs)].get(max(needed))
    if found is None:
        raise TypeClashError
    return found


def _common_nested(one: Any, other: Any) -> Any:
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        if any(len({field.name for field in each}) != each.num_fields for each in (one, other)):
            raise TypeClashError
        fields: dict[str, Any] = {field.name: field.with_nullable(True) for field in one}
        for field in other:
            known = fields.get(field.name, field.with_nullable(True))
            fields[field.name] = known.with_type(common_type(known.type, field.type))
        return pa.struct(list(fields.values()))
    if pa.types.is_map(one) and pa.types.is_map(other):
        return pa.map_(
            common_type(one.key_type, other.key_type), common_type(one.item_type, other.item_type)
        )
    lists: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
        (pa.types.is_list, pa.list_),
        (_is_any_list, pa.large_list),
    )
    for is_kind, build in lists:
        if is_kind(one) and is_kind(other):
            item = one.value_field.with_nullable(True)
            return build(item.with_type(common_type(one.value_type, other.value_type)))
    return None


def _common_promoted(one: Any, other: Any) -> Any:
    """Leave decimals, times and dates of one kind to Arrow, whose promotions widen only."""
    kinds = (
        pa.types.is_date,
        pa.types.is_decimal,
        pa.types.is_duration,
        pa.types.is_time,
        pa.types.is_timestamp,
    )
    if not any(is_kind(one) and is_kind(other) for is_kind in kinds):
        raise TypeClashError
    try:
        schemas = [pa.schema([pa.field("value", each)]) for each in (one, other)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TypeClashError from error


def _common_metadata(schemas: Iterable[Any]) -> dict[bytes, bytes]:
    """Keep what all files agree on, less pandas' own, which describes an index that is not ours."""
    first, *others = (schema.metadata or {} for schema in schemas)
    return {
        key: value
        for key, value in first.items()
        if key != b"pandas" and all(other.get(key) == value for other in others)
    }


def _is_string(data_type: Any) -> bool:
    return bool(
        pa.types.is_string(data_type)
        or pa.types.is_large_string(data_type)
        or pa.types.is_string_view(data_type)
    )


def _is_bytes(data_type: Any) -> bool:
    return bool(
        pa.types.is_binary(data_type)
        or pa.types.is_large_binary(data_type)
        or pa.types.is_binary_view(data_type)
        or pa.types.is_fixed_size_binary(data_type)
    )


def _is_any_list(data_type: Any) -> bool:
    return bool(pa.types.is_list(data_type) or pa.types.is_large_list(data_type))
