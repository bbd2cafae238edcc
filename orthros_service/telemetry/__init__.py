"""Logs and metrics: set up once at an entry point, used everywhere."""

from orthros_service.telemetry.context import current_phase, current_request_id, log_context
from orthros_service.telemetry.logs import configure_logging
from orthros_service.telemetry.metrics import METRICS, MetricSpec, MetricsSink
from orthros_service.telemetry.prometheus import CONTENT_TYPE, PrometheusMetrics

__all__ = [
    "CONTENT_TYPE",
    "METRICS",
    "MetricSpec",
    "MetricsSink",
    "PrometheusMetrics",
    "configure_logging",
    "current_phase",
    "current_request_id",
    "log_context",
]
