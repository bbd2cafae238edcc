"""Which service a batch job uses: the one that runs, one of its own, or none."""

import logging
import sys
from types import SimpleNamespace

import pytest

from orthros_deployments import batch_service
from orthros_service.errors import UnavailableError
from orthros_service.jobs import build_spec, make_plan
from orthros_service.jobs.row_types import RowTask
from orthros_service.settings import DeploymentSettings, Settings


class FakeRay:
    """Stands in for Ray: one cluster, perhaps with a service in some status."""

    def __init__(self, monkeypatch, status, has_cluster):
        self.status, self.has_cluster = status, has_cluster
        self.is_connected = False
        self.started, self.stopped = [], []
        applications = {"orthros": SimpleNamespace(status=SimpleNamespace(value=status))}
        self.serve = SimpleNamespace(
            status=lambda: SimpleNamespace(applications=applications if status else {})
        )
        monkeypatch.setitem(sys.modules, "ray", self)
        monkeypatch.setattr(batch_service, "start_service", self.start)
        monkeypatch.setattr(batch_service, "stop_service", self.stopped.append)
        monkeypatch.setattr(batch_service.environment, "prepare_variables", lambda settings: None)
        monkeypatch.setattr(batch_service.environment, "can_reach", lambda address: True)
        found = ["here:1"] if has_cluster else []
        monkeypatch.setattr(batch_service, "find_services", lambda: found)

    def init(self, address, **_):
        if not self.has_cluster:
            raise ConnectionError("no cluster")
        self.is_connected = True

    def shutdown(self):
        self.is_connected = False

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address="here:1")

    def start(self, settings, *, is_announced):
        assert not is_announced
        self.started.append(settings)
        return "service"


@pytest.fixture
def ray_with(monkeypatch):
    return lambda status, *, has_cluster=True: FakeRay(monkeypatch, status, has_cluster)


def _use(settings, *, can_start):
    notes = []
    with batch_service.running_service(settings, can_start=can_start, tell=notes.append):
        pass
    return notes


def _named():
    return Settings(deployment=DeploymentSettings(ray_address="there:1"))


def test_a_service_that_runs_is_used_and_left_running(ray_with):
    ray = ray_with("RUNNING")

    assert _use(Settings(), can_start=True) == ["using the service that runs on Ray at here:1"]
    assert (ray.started, ray.stopped, ray.is_connected) == ([], [], False)


@pytest.mark.parametrize(
    ("status", "has_cluster"), [(None, False), (None, True), ("UNHEALTHY", True)]
)
def test_without_one_a_service_is_started_and_stopped_also_after_a_failure(
    ray_with, status, has_cluster
):
    ray = ray_with(status, has_cluster=has_cluster)

    (note,) = _use(Settings(), can_start=True)
    assert note.startswith("no service runs here")
    with (
        pytest.raises(ZeroDivisionError),
        batch_service.running_service(Settings(), can_start=True, tell=lambda note: None),
    ):
        raise ZeroDivisionError

    assert ray.stopped == ["service", "service"]
    # A cluster found by chance is left, so that the service gets one of its own.
    assert not ray.is_connected
    # Its port is in nobody's way.
    assert ray.started[0].gateway.port != Settings().gateway.port


@pytest.mark.parametrize(
    ("status", "has_cluster"), [(None, False), (None, True), ("DEPLOYING", True)]
)
def test_where_none_may_be_started_the_error_says_how_to(ray_with, status, has_cluster):
    ray = ray_with(status, has_cluster=has_cluster)

    with pytest.raises(UnavailableError, match="orthros serve"):
        _use(Settings(), can_start=False)
    assert (ray.started, ray.is_connected) == ([], False)


def test_a_named_cluster_gets_the_service_but_never_loses_the_one_it_has(ray_with):
    ray = ray_with(None)
    _use(_named(), can_start=True)
    assert (len(ray.started), ray.is_connected) == (1, True)

    ray = ray_with("DEPLOYING")
    with pytest.raises(UnavailableError, match="DEPLOYING"):
        _use(_named(), can_start=True)
    assert (ray.started, ray.is_connected) == ([], False)


def test_a_named_cluster_that_is_not_there_is_an_error(ray_with):
    ray_with(None, has_cluster=False)

    with pytest.raises(UnavailableError, match="there:1"):
        _use(_named(), can_start=True)


def test_several_services_are_not_chosen_between(ray_with, monkeypatch):
    ray = ray_with("RUNNING")
    monkeypatch.setattr(batch_service, "find_services", lambda: ["here:1", "here:2"])

    with pytest.raises(UnavailableError, match=r"here:1, here:2.*RAY_ADDRESS"):
        _use(Settings(), can_start=True)
    assert not ray.is_connected


def test_a_named_cluster_where_nothing_listens_fails_before_ray_tries(ray_with, monkeypatch):
    ray = ray_with("RUNNING")
    monkeypatch.setattr(batch_service.environment, "can_reach", lambda address: False)

    with pytest.raises(UnavailableError, match="there:1"):
        _use(_named(), can_start=True)
    assert not ray.is_connected


def test_a_jobs_worker_keeps_serves_notes_off_the_terminal(backend, model, write, tmp_path):
    from orthros_deployments.batch import _AnswerAndWrite

    source, output = str(write(text=["one"])), str(tmp_path / "out")
    spec = build_spec(input=source, output=output, summarize=True)
    logger = logging.getLogger("ray.serve")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        stage = _AnswerAndWrite(
            open_backend=lambda: backend,
            task=RowTask.of(spec, make_plan(spec)),
            model=model,
            output=output,
            concurrency=1,
            board=SimpleNamespace(add=SimpleNamespace(remote=print)),
        )
        stage._worker.close()
        assert not logger.isEnabledFor(logging.INFO)
    finally:
        logger.setLevel(before)
