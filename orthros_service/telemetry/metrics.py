"""Every metric of the service, declared once, and the sink that records them.

The names are public. Labels come from the closed sets below, never from a caller: no document,
request or user id. A value outside its set is recorded as "other".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

MetricKind = Literal["counter", "gauge", "histogram"]
OTHER = "other"

PHASES = ("queue", "prefill", "handoff", "load", "first_step", "decode")
TIERS = ("device", "memory", "disk")
OUTCOMES = ("ok", "client_error", "server_error", "cancelled")
ENDPOINTS = (
    "documents",
    "document",
    "document_events",
    "answers",
    "summaries",
    "tokens_count",
    "chat_completions",
    "models",
    "model",
    "healthz",
    "readyz",
    "metrics",
)
CODES = (
    "none",
    "malformed_request",
    "invalid_value",
    "empty_document",
    "invalid_text",
    "not_found",
    "model_not_found",
    "method_not_allowed",
    "document_not_ready",
    "context_length_exceeded",
    "document_too_large",
    "document_corrupted",
    "unsupported_document",
    "overloaded",
    "deadline_exceeded",
    "cancelled",
    "unavailable",
    "model_error",
    "state_error",
    "state_mismatch",
    "state_corrupted",
    "engine_error",
    "conversion_failed",
    "job_failed",
    "incomplete_output",
    "internal",
)

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric.

    Args:
        name: Public name, with its base unit; counters end in `_total`.
        kind: How values are recorded.
        help: One sentence for whoever reads the scrape.
        labels: Label name to the values that it may take.
        buckets: Upper bounds of a histogram, ascending and > 0; empty for the other kinds.
    """

    name: str
    kind: MetricKind
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, **labels: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(name=name, kind="counter", help=text, labels=labels)


def _gauge(name: str, text: str, **labels: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(name=name, kind="gauge", help=text, labels=labels)


def _histogram(
    name: str, text: str, *, buckets: tuple[float, ...] = _REQUEST_S, **labels: tuple[str, ...]
) -> MetricSpec:
    return MetricSpec(name=name, kind="histogram", help=text, labels=labels, buckets=buckets)


METRICS: tuple[MetricSpec, ...] = (
    _counter(
        "orthros_requests_total",
        "Finished HTTP requests by endpoint, outcome and error code.",
        endpoint=ENDPOINTS,
        outcome=OUTCOMES,
        code=CODES,
    ),
    _histogram(
        "orthros_request_duration_seconds",
        "Seconds from a request's arrival to the end of its response.",
        endpoint=ENDPOINTS,
    ),
    _histogram(
        "orthros_request_phase_seconds", "Seconds that a request spent in a phase.", phase=PHASES
    ),
    _histogram(
        "orthros_time_to_first_token_seconds",
        "Seconds from a request's arrival to its first token; a miss waited for a prefill.",
        cache=("hit", "miss", "none"),
    ),
    _histogram(
        "orthros_inter_token_seconds", "Seconds per token after the first.", buckets=_FAST_S
    ),
    _counter("orthros_prompt_tokens_total", "Tokens of questions, history and templates."),
    _counter("orthros_generated_tokens_total", "Tokens of answers."),
    _counter("orthros_prefill_tokens_total", "Document tokens prefilled.", mode=("full", "linear")),
    _gauge("orthros_pending_prefill_tokens", "Document tokens that wait for their prefill."),
    _gauge(
        "orthros_ingestions_running",
        "Ingestions that wait or run, those of texts that came with a question among them.",
    ),
    _gauge(
        "orthros_decode_sequences", "Requests that decode workers hold: handed over or decoding."
    ),
    _gauge("orthros_requests_in_flight", "Generations that are running."),
    _gauge("orthros_queue_depth", "Generations that wait to be admitted."),
    _counter(
        "orthros_admission_rejections_total",
        "Generations refused at admission.",
        reason=("queue_full", "queue_timeout"),
    ),
    _counter(
        "orthros_cancellations_total",
        "Requests whose caller left, by the phase that it left in.",
        phase=PHASES,
    ),
    _histogram(
        "orthros_cancel_release_seconds",
        "Seconds from a caller's leaving to the release of its work.",
        buckets=_FAST_S,
        phase=PHASES,
    ),
    _counter(
        "orthros_ingestions_total",
        "Finished document ingestions.",
        outcome=("ready", "failed"),
    ),
    _histogram(
        "orthros_ingestion_seconds", "Seconds to ingest a document.", mode=("full", "linear")
    ),
    _counter("orthros_handoff_bytes_total", "Bytes of state handed to decode.", tier=TIERS),
    _histogram("orthros_handoff_seconds", "Seconds to hand a state to decode.", tier=TIERS),
    _gauge("orthros_state_bytes", "Bytes of attention states that are kept.", tier=TIERS),
    _counter(
        "orthros_state_lookups_total",
        "Look-ups of a stored attention state.",
        tier=TIERS,
        result=("hit", "miss"),
    ),
    _counter("orthros_state_evictions_total", "States dropped to make room.", tier=TIERS),
    _counter("orthros_retries_total", "Work that was sent again.", phase=PHASES),
    _counter(
        "orthros_citations_total",
        "Citations that were sent, and those dropped because they did not match the text.",
        verdict=("exact", "dropped"),
    ),
)


class MetricsSink(Protocol):
    """Where metric values go; names and labels are those of `METRICS`, others are a bug and raise.

    Implementations are safe to call from several threads.
    """

    def increment(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        ...

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Record one value of a histogram."""
        ...

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        ...


def closed_labels(spec: MetricSpec, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels with values outside their closed set replaced by "other".

    Raises:
        ValueError: The label names are not the metric's.
    """
    if labels.keys() != spec.labels.keys():
        raise ValueError(
            f"{spec.name} takes the labels {sorted(spec.labels)}, not {sorted(labels)}"
        )
    return {name: value if value in spec.labels[name] else OTHER for name, value in labels.items()}
