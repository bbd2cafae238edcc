"""How a job as a whole can fail; what is wrong with a row becomes a row."""

from orthros_service.errors import OrthrosError


class JobFailedError(OrthrosError):
    """The job stopped before its end; the output has no success marker and must not be used."""

    code = "job_failed"


class IncompleteOutputError(JobFailedError):
    """The output does not hold each input row exactly once."""

    code = "incomplete_output"
