"""Logging of a replica."""

import logging
import sys

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
