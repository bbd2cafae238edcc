"""Make string columns valid: what a writer stored as a string and is not UTF-8 breaks every reader.

Binary columns are never touched.
"""

from typing import Any

import pyarrow as pa


def repair_strings(table: Any) -> tuple[Any, int]:
    """Replace bytes that are not UTF-8 by U+FFFD inside string columns, also nested ones.

    Returns:
        The table with the same schema, and how many values were changed.
    """
    num_repaired = 0
    for index, field in enumerate(table.schema):
        column = table.column(index)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            repair = _Repair()
            chunks = [repair.array(chunk) for chunk in column.chunks]
            table = table.set_column(index, field, pa.chunked_array(chunks, type=field.type))
            num_repaired += repair.num_repaired
    return table, num_repaired


class _Repair:
    """Walks one column and counts what it changes."""

    def __init__(self) -> None:
        self.num_repaired = 0

    def array(self, array: Any) -> Any:
        kind = array.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return self._strings(array, pa.large_binary())
        if pa.types.is_string_view(kind):
            return self._strings(array, pa.binary_view())
        if pa.types.is_dictionary(kind):
            codes = self.array(array.dictionary_decode()).dictionary_encode()
            indices = codes.indices.cast(kind.index_type)
            return pa.DictionaryArray.from_arrays(indices, codes.dictionary, ordered=kind.ordered)
        if isinstance(array, pa.ExtensionArray):
            return pa.ExtensionArray.from_storage(kind, self.array(array.storage))
        return self._nested(array)

    def _strings(self, array: Any, raw: Any) -> Any:
        values = [self._value(value) for value in array.cast(raw).to_pylist()]
        return pa.array(values, array.type)

    def _value(self, value: bytes | None) -> str | None:
        if value is None:
            return None
        try:
            return value.decode()
        except UnicodeDecodeError:
            self.num_repaired += 1
            return value.decode("utf-8", "replace")

    def _nested(self, array: Any) -> Any:
        kind = array.type
        # A joined copy starts at offset zero, which the constructors with a mask ask for.
        array = pa.concat_arrays([array, array.slice(0, 0)])
        mask = array.is_null()
        if pa.types.is_struct(kind):
            children = [self.array(array.field(index)) for index in range(kind.num_fields)]
            return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
        if pa.types.is_map(kind):
            keys, items = self.array(array.keys), self.array(array.items)
            return pa.MapArray.from_arrays(array.offsets, keys, items, type=kind, mask=mask)
        if pa.types.is_list(kind):
            values = self.array(array.values)
            return pa.ListArray.from_arrays(array.offsets, values, type=kind, mask=mask)
        if pa.types.is_large_list(kind):
            values = self.array(array.values)
            return pa.LargeListArray.from_arrays(array.offsets, values, type=kind, mask=mask)
        if pa.types.is_fixed_size_list(kind):
            return pa.FixedSizeListArray.from_arrays(self.array(array.values), type=kind, mask=mask)
        return array
