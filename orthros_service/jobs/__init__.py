"""Batch jobs over Parquet: what is asked, the plan, the rows, the output, the report."""

from orthros_service.jobs.failures import IncompleteOutputError, JobFailedError
from orthros_service.jobs.plan import JobPlan, make_plan
from orthros_service.jobs.report import JobReport
from orthros_service.jobs.spec import JobSpec, build_spec

__all__ = [
    "IncompleteOutputError",
    "JobFailedError",
    "JobPlan",
    "JobReport",
    "JobSpec",
    "build_spec",
    "make_plan",
]
