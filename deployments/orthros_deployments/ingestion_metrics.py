"""Metrics of ingestion, taken from the progress that is recorded anyway."""

import time
from dataclasses import dataclass, field

from orthros_service.ingest import ProgressRecorder
from orthros_service.telemetry import MetricsSink
from orthros_service.types import IngestProgress


@dataclass(slots=True, kw_only=True)
class _Running:
    started_at: float = field(default_factory=time.monotonic)
    num_pending: int = 0


class MeasuredRecorder:
    """Passes progress on and counts it; called from one thread, like every recorder.

    Args:
        recorder: Where progress goes.
        metrics: Where numbers go.
    """

    def __init__(self, recorder: ProgressRecorder, metrics: MetricsSink) -> None:
        self._recorder = recorder
        self._metrics = metrics
        self._running: dict[str, _Running] = {}

    def record(self, content_key: str, progress: IngestProgress) -> None:
        """Store the latest progress of a content; unknown contents are ignored."""
        self._measure(content_key, progress)
        self._recorder.record(content_key, progress)

    def _measure(self, content_key: str, progress: IngestProgress) -> None:
        if progress.status in ("ready", "failed"):
            running = self._running.pop(content_key, None)
            # A state that was there already was not ingested.
            if running is not None:
                self._metrics.increment("orthros_ingestions_total", outcome=progress.status)
            if running is not None and progress.mode is not None and progress.status == "ready":
                seconds = time.monotonic() - running.started_at
                self._metrics.observe("orthros_ingestion_seconds", seconds, mode=progress.mode)
        else:
            running = self._running.setdefault(content_key, _Running())
            running.num_pending = (progress.num_tokens or 0) - progress.tokens_done
        pending = sum(each.num_pending for each in self._running.values())
        self._metrics.set("orthros_pending_prefill_tokens", pending)
