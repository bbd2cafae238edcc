"""Which column a name means: a top-level column, or a field inside structs by its dotted path."""

import difflib
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orthros_service.errors import InvalidValueError
from orthros_service.jobs.schemas import decode_dictionary, is_text

_TEXT_TYPES = "string, large_string, string_view, a dictionary of these, or binary holding UTF-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPath:
    """Where the values of a named column lie.

    Args:
        name: As the job gave it.
        parts: The top-level column, then struct fields.
    """

    name: str
    parts: tuple[str, ...]

    def is_in(self, schema: Any) -> bool:
        """Whether a file of this `pa.Schema` holds the column."""
        return _type_at(schema, self.parts) is not None

    def read(self, table: Any) -> Any:
        """Return the values of a `pa.Table` as a `pa.ChunkedArray`, without dictionaries."""
        column = table.column(self.parts[0])
        if len(self.parts) > 1:
            column = pc.struct_field(column, list(self.parts[1:]))
        return decode_dictionary(column)

    def read_bytes(self, table: Any) -> Any:
        """Return the values as a `pa.ChunkedArray` of `large_binary`; nulls stay nulls."""
        return self.read(table).cast(pa.large_binary())


def find_column(schema: Any, name: str) -> ColumnPath:
    """Find a column of any type.

    Quotes around a name that has dots mean the top-level column of exactly that name.

    Raises:
        InvalidValueError: There is none, or a dotted name means two things.
    """
    quoted = name[1:-1] if len(name) > 2 and name[0] == name[-1] == '"' else None
    exact = quoted if quoted is not None and quoted in schema.names else name
    parts = tuple(name.split("."))
    is_nested = len(parts) > 1 and _type_at(schema, parts) is not None
    if exact in schema.names and is_nested:
        raise InvalidValueError(
            f"{name!r} is both a column and a field inside column {parts[0]!r}; "
            f"write '\"{name}\"' for the column, or rename one.",
            column=name,
        )
    if exact in schema.names:
        return ColumnPath(name=name, parts=(exact,))
    if is_nested:
        return ColumnPath(name=name, parts=parts)
    available = ", ".join(repr(each) for each in schema.names) or "none"
    close = difflib.get_close_matches(name, schema.names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise InvalidValueError(
        f"No file has a column {name!r}; available are {available}.{hint}", column=name
    )


def find_text_column(schema: Any, name: str, *, purpose: str) -> ColumnPath:
    """Find a column whose values can be text.

    Raises:
        InvalidValueError: As `find_column`, or the column has another type.
    """
    path = find_column(schema, name)
    found = _type_at(schema, path.parts)
    if is_text(found):
        return path
    others = [field.name for field in schema if is_text(field.type)]
    hint = f" Text columns here: {', '.join(map(repr, others))}." if others else ""
    raise InvalidValueError(
        f"The {purpose} column {name!r} has type {found}; it must be {_TEXT_TYPES}.{hint}",
        column=name,
    )


def _type_at(schema: Any, parts: tuple[str, ...]) -> Any:
    if parts[0] not in schema.names:
        return None
    found = schema.field(parts[0]).type
    for part in parts[1:]:
        if not pa.types.is_struct(found) or found.get_field_index(part) < 0:
            return None
        found = found.field(part).type
    return found
