"""Metrics of ingestion, taken from the progress that is recorded anyway."""

import time

from orthros_service.ingest import ProgressRecorder
from orthros_service.telemetry import MetricsSink
from orthros_service.types import IngestProgress


class MeasuredRecorder:
    """Passes progress on and counts it; called from one thread, like every recorder.

    Args:
        recorder: Where progress goes.
        metrics: Where numbers go.
    """

    def __init__(self, recorder: ProgressRecorder, metrics: MetricsSink) -> None:
        self._recorder = recorder
        self._metrics = metrics
        self._started_at: dict[str, float] = {}

    def record(self, content_key: str, progress: IngestProgress) -> None:
        """Store the latest progress of a content; unknown contents are ignored."""
        self._measure(content_key, progress)
        self._recorder.record(content_key, progress)

    def forget(self, content_key: str) -> None:
        """Drop what is remembered of an ingestion that ends without a last record."""
        self._started_at.pop(content_key, None)

    def _measure(self, content_key: str, progress: IngestProgress) -> None:
        if progress.status not in ("ready", "failed"):
            self._started_at.setdefault(content_key, time.monotonic())
            return
        started_at = self._started_at.pop(content_key, None)
        if started_at is None:
            # A state that was there already was not ingested.
            return
        self._metrics.increment("orthros_ingestions_total", outcome=progress.status)
        if progress.mode is not None and progress.status == "ready":
            seconds = time.monotonic() - started_at
            self._metrics.observe("orthros_ingestion_seconds", seconds, mode=progress.mode)
