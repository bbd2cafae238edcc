"""Settings: nothing unknown is accepted, and every setting is documented where it is defined."""

import runpy
from pathlib import Path

import pytest

from orthros_service.errors import InvalidValueError
from orthros_service.settings import Settings, load_settings

LEAVES = [
    (f"{group}.{name}", field)
    for group, outer in Settings.model_fields.items()
    for name, field in outer.annotation.model_fields.items()
]


@pytest.mark.parametrize("name", ["ORTHROS_GATEWY__PORT", "ORTHROS_PORT", "ORTHROS_GATEWAY__PROT"])
def test_an_unknown_variable_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(InvalidValueError) as caught:
        load_settings()
    assert name.rsplit("__", maxsplit=1)[-1].lower() in caught.value.message.lower()


@pytest.mark.parametrize("value", ["0", "65536", "eighty", ""])
def test_a_port_that_cannot_be_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTHROS_GATEWAY__PORT", value)
    with pytest.raises(InvalidValueError, match="ORTHROS_GATEWAY__PORT is"):
        load_settings()


def test_a_known_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTHROS_GATEWAY__PORT", "8123")
    assert load_settings().gateway.port == 8123


@pytest.mark.parametrize(("name", "field"), LEAVES, ids=[name for name, _ in LEAVES])
def test_every_setting_has_a_default_and_a_sentence(name: str, field) -> None:
    assert not field.is_required()
    assert (field.description or "").endswith(".")


def test_the_reference_of_settings_is_current(root: Path) -> None:
    render = runpy.run_path(str(root / "docs/settings_reference.py"))["render"]
    written = (root / "docs/settings.md").read_text(encoding="utf-8")
    assert written == render(), "run `make docs`"
