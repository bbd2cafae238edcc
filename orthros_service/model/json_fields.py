"""Read the members of a JSON object from outside, each with its type and range checked."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthros_service.errors import ModelError

MAX_INTEGER = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonFields:
    """A JSON object and where it came from.

    Every error names file, field, value and what is allowed. A null member counts as absent.

    Args:
        source: What errors call it: a file, or a file and the member that holds this object.
        members: The object itself.
    """

    source: str
    members: Mapping[str, Any]

    def has(self, name: str) -> bool:
        """Whether the member is there and not null."""
        return self.members.get(name) is not None

    def error(self, name: str, allowed: str) -> ModelError:
        """The error for a member whose value is not allowed."""
        shown = repr(self.members.get(name))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ModelError(f"{self.source}: {name!r} is {shown}; allowed is {allowed}.")

    def require(self, name: str) -> Any:
        """The member's value.

        Raises:
            ModelError: It is absent or null.
        """
        if not self.has(name):
            raise ModelError(f"{self.source}: the required member {name!r} is missing.")
        return self.members[name]

    def integer(self, name: str, *, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; required if there is no default."""
        value = self._value(name, default)
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or not minimum <= value <= MAX_INTEGER
        ):
            raise self.error(name, f"a whole number from {minimum} to {MAX_INTEGER}")
        return value

    def number(self, name: str, *, default: float | None = None, minimum: float) -> float:
        """A finite number of at least `minimum`; required if there is no default."""
        value = self._value(name, default)
        if not is_finite_number(value) or value < minimum:
            raise self.error(name, f"a finite number of at least {minimum}")
        return float(value)

    def optional_number(self, name: str, *, minimum: float) -> float | None:
        """Like `number`, but None if the member is absent."""
        return self.number(name, minimum=minimum) if self.has(name) else None

    def boolean(self, name: str, *, default: bool | None = None) -> bool:
        """True or false; required if there is no default."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def string(self, name: str, *, default: str | None = None) -> str:
        """A text; required if there is no default."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def choice(self, name: str, allowed: Iterable[str], *, default: str | None = None) -> str:
        """One of the allowed texts; required if there is no default."""
        value = self._value(name, default)
        names = list(allowed)
        if value not in names:
            raise self.error(name, "one of " + ", ".join(repr(item) for item in names))
        return str(value)

    def nested(self, name: str) -> "JsonFields":
        """An object inside this one."""
        value = self.require(name)
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return JsonFields(source=f"{self.source}, member {name!r}", members=value)

    def _value(self, name: str, default: object) -> Any:
        if default is not None and not self.has(name):
            return default
        return self.require(name)


def is_finite_number(value: object) -> bool:
    """Whether a JSON value is a number, and neither infinite nor NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= MAX_INTEGER if isinstance(value, int) else math.isfinite(value)


def read_json_object(path: Path) -> JsonFields:
    """Read a file that holds one JSON object.

    Raises:
        ModelError: The file is missing or unreadable, is not UTF-8 JSON, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; a model directory must hold it.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON in UTF-8: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}; an object is needed.")
    return JsonFields(source=str(path), members=content)
