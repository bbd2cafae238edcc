"""Services of this machine find one another by notes, and stale notes are passed over."""

import socket

import pytest

from orthros_deployments import local_services
from orthros_service.errors import InvalidValueError
from orthros_service.settings import load_settings


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(local_services, "_folder", lambda: tmp_path / "notes")
    return tmp_path / "notes"


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_an_announced_service_is_found_until_it_is_withdrawn(folder, address):
    assert local_services.find_services() == []
    note = local_services.announce(address)
    assert local_services.find_services() == [address]
    local_services.withdraw(note)
    assert local_services.find_services() == []


def test_a_note_of_a_service_that_is_gone_is_passed_over(folder, address):
    local_services.announce(address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = f"127.0.0.1:{server.getsockname()[1]}"
    (folder / "1.ray-address").write_text(gone)
    assert local_services.find_services() == [address]


def test_notes_that_others_could_have_written_are_not_believed(folder, address):
    local_services.announce(address)
    folder.chmod(0o777)
    assert local_services.find_services() == []
    assert local_services.announce(address) is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ORTHROS_GATEWAY__PROT", "1", "ORTHROS_GATEWAY__PROT is not a setting; did you mean "
         "ORTHROS_GATEWAY__PORT?"),
        ("ORTHROS_GATEWAY__PORT", "abc", "ORTHROS_GATEWAY__PORT is 'abc': "),
        ("ORTHROS_LOG__LEVEL", "verbose", "ORTHROS_LOG__LEVEL is 'verbose': "),
    ],
)  # fmt: skip
def test_a_setting_that_is_wrong_is_named_as_it_was_written(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidValueError) as caught:
        load_settings()
    assert said in caught.value.message
    assert "pydantic" not in caught.value.message
