"""What is checked and decided before anything starts."""

import signal
import socket
from pathlib import Path

import pytest

from orthros_deployments import environment
from orthros_service.errors import InvalidValueError, ModelError
from orthros_service.settings import (
    DocumentSettings,
    GatewaySettings,
    ModelSettings,
    Settings,
    StateSettings,
)


def test_relative_paths_are_resolved_against_the_starting_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = environment.with_absolute_paths(Settings())
    assert settings.model.directory == tmp_path / "models/smollm2-135m-instruct"
    assert settings.documents.database_url == f"sqlite:///{tmp_path}/data/orthros.db"
    assert settings.documents.text_uri == f"{tmp_path}/data/texts"
    assert settings.state.uri == f"{tmp_path}/data/states"


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "postgresql+psycopg://user@host/orthros"]
)
def test_addresses_that_are_no_relative_paths_stay_as_they_are(url):
    settings = Settings(
        documents=DocumentSettings(database_url=url, text_uri="s3://bucket/texts"),
        state=StateSettings(uri="s3://bucket/states"),
    )
    changed = environment.with_absolute_paths(settings)
    assert changed.documents == settings.documents
    assert changed.state == settings.state


def test_an_absolute_database_path_keeps_its_place(tmp_path):
    url = f"sqlite:///{tmp_path}/o.db"
    settings = Settings(documents=DocumentSettings(database_url=url))
    assert environment.with_absolute_paths(settings).documents.database_url == url


def test_a_port_in_use_is_refused_with_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidValueError, match=rf"Port {port} on 127.0.0.1 is taken.*--port"):
            environment.check_address("127.0.0.1", port)
    environment.check_address("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_that_is_not_of_this_machine_is_refused(host):
    with pytest.raises(InvalidValueError, match="cannot listen"):
        environment.check_address(host, 8000)


def _settings(directory: Path) -> Settings:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Settings(model=ModelSettings(directory=directory), gateway=GatewaySettings(port=port))


def test_a_missing_model_is_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(ModelError, match="orthros models prepare"):
        environment.check_startable(_settings(tmp_path / "none"))


def test_a_damaged_model_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        environment.check_startable(_settings(tmp_path))


def test_a_cluster_that_was_found_is_joined_with_rays_own_token(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    monkeypatch.setattr(environment.os, "environ", written := {})
    environment.prepare_variables(Settings())
    assert "RAY_AUTH_MODE" not in written
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("secret")
    environment.prepare_variables(Settings())
    assert written["RAY_AUTH_MODE"] == "token"


def test_a_gpu_that_is_not_there_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_GPU_FOLDER", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    model = ModelSettings(directory=tmp_path, device="cuda")
    with pytest.raises(InvalidValueError, match="no NVIDIA GPU"):
        environment.check_startable(Settings(model=model))


def test_the_places_of_data_are_absolute_and_show_no_password(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = "postgresql+psycopg://user:secret@host/orthros"
    places = environment.data_places(Settings(documents=DocumentSettings(database_url=url)))
    assert places[0] == "postgresql+psycopg://user:***@host/orthros"
    assert places[1:] == [f"{tmp_path}/data/texts", f"{tmp_path}/data/states"]


def test_a_signal_interrupts_also_where_it_was_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), environment.interrupted_by_signals():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
