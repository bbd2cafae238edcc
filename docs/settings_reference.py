"""Write settings.md, the reference of every setting, from the settings themselves: `make docs`."""

from enum import Enum
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from orthros_service.settings import PREFIX, Settings

TARGET = Path(__file__).with_name("settings.md")

HEAD = """\
# Settings

Written by `make docs` from `orthros_service/settings.py`; change it there.

Every setting is an environment variable. They are read once, when a command starts; an unknown name
or a value that is not allowed stops it with a message that names the variable. What is not set has
the default given here.
"""


def render() -> str:
    """Return the text of settings.md."""
    parts = [HEAD]
    for name, field in Settings.model_fields.items():
        group = field.annotation
        if not (isinstance(group, type) and issubclass(group, BaseModel)):
            raise TypeError(f"{name} is not a group of settings; every setting belongs to one.")
        parts.append(_section(name, group))
    return "\n".join(parts)


def _section(name: str, group: type[BaseModel]) -> str:
    lines = [f"## {name}", "", (group.__doc__ or "").strip(), ""]
    lines += ["| variable | default | meaning |", "| --- | --- | --- |"]
    for key, field in group.model_fields.items():
        variable = f"{PREFIX}{name}__{key}".upper()
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{variable}` | {_default(field.get_default())} | {meaning} |")
    return "\n".join(lines) + "\n"


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "(required)"
    if value is None:
        return "not set"
    return f"`{value.value if isinstance(value, Enum) else value}`"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
