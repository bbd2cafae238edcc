"""Ingestion: text -> tokens -> prefill steps -> segments -> a ready state."""

from orthros_service.ingest.ingestor import Ingestor
from orthros_service.ingest.job import not_ready_in_time
from orthros_service.ingest.ports import DocumentTokenizer, PrefillWorker, ProgressRecorder, Source
from orthros_service.ingest.prefiller import Prefiller

__all__ = [
    "DocumentTokenizer",
    "Ingestor",
    "PrefillWorker",
    "Prefiller",
    "ProgressRecorder",
    "Source",
    "not_ready_in_time",
]
