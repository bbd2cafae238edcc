"""One request through the workers: states, then the tail in decode mode, then text and evidence."""

from orthros_service.pipeline.pipeline import Pipeline
from orthros_service.pipeline.ports import (
    CoordinatorPort,
    DecodeWorker,
    EvidenceSelector,
    TailFormat,
)
from orthros_service.pipeline.prompt import PromptLimits, PromptPlan, PromptPlanner

__all__ = [
    "CoordinatorPort",
    "DecodeWorker",
    "EvidenceSelector",
    "Pipeline",
    "PromptLimits",
    "PromptPlan",
    "PromptPlanner",
    "TailFormat",
]
