"""Numbers taken from the progress of ingestions."""

import pytest

from orthros_deployments.ingestion_metrics import MeasuredRecorder
from orthros_service.telemetry import PrometheusMetrics
from orthros_service.types import IngestProgress


class Kept:
    def __init__(self) -> None:
        self.records: list[tuple[str, str]] = []

    def record(self, content_key: str, progress: IngestProgress) -> None:
        self.records.append((content_key, progress.status))


@pytest.fixture
def metrics():
    return PrometheusMetrics()


@pytest.fixture
def recorder(metrics):
    return MeasuredRecorder(Kept(), metrics)


def _progress(status, done=0, total=100):
    mode = None if status == "queued" else "linear"
    return IngestProgress(
        status=status, mode=mode, num_tokens=total, tokens_done=done, tokens_per_s=None
    )


def test_an_ingestion_that_was_deleted_is_timed_anew(metrics, recorder, monkeypatch):
    clock = iter([0.0, 100.0, 101.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    recorder.record("a", _progress("ingesting", 30))
    recorder.forget("a")
    recorder.record("a", _progress("ingesting", 0))
    recorder.record("a", _progress("ready", 100))
    assert 'orthros_ingestion_seconds_sum{mode="linear"} 1.0' in metrics.render()


def test_finished_ingestions_are_counted_by_outcome_and_timed_when_ready(metrics, recorder):
    recorder.record("a", _progress("ingesting"))
    recorder.record("a", _progress("ready", 100))
    recorder.record("b", _progress("queued"))
    recorder.record("b", _progress("failed"))
    page = metrics.render()
    assert 'orthros_ingestions_total{outcome="ready"} 1.0' in page
    assert 'orthros_ingestions_total{outcome="failed"} 1.0' in page
    assert 'orthros_ingestion_seconds_count{mode="linear"} 1.0' in page


def test_a_state_that_was_there_already_is_not_counted_as_ingested(metrics, recorder):
    recorder.record("a", _progress("ready", 100))
    assert "orthros_ingestions_total{" not in metrics.render()


def test_every_report_is_passed_on(metrics):
    kept = Kept()
    recorder = MeasuredRecorder(kept, metrics)
    recorder.record("a", _progress("ingesting"))
    recorder.record("a", _progress("ready", 100))
    assert kept.records == [("a", "ingesting"), ("a", "ready")]
