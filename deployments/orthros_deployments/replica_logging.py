"""Logging of a replica."""

import logging
import sys

from ray.serve import get_replica_context

from orthros_service.settings import LogSettings
from orthros_service.telemetry import configure_logging


def configure_replica_logging(settings: LogSettings) -> None:
    """Send this replica's logs to its standard error, which Ray keeps and forwards.

    Serve's own logs go to its files, and it redirects `sys.stderr` there as well.

    Args:
        settings: Level and format.
    """
    configure_logging(settings, stream=sys.__stderr__)
    # One line per request of ours is enough.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if settings.format == "json":
        _name_replica()


def _name_replica() -> None:
    """Put deployment and replica on every record; text lines get them from Ray, as a prefix."""
    context = get_replica_context()
    make_record = logging.getLogRecordFactory()

    def factory(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        record.deployment = context.deployment
        record.replica = context.replica_id.unique_id
        return record

    logging.setLogRecordFactory(factory)
