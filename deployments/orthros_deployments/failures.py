"""From the service's errors to what a user of the command line reads."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from orthros_service.errors import OrthrosError

EXIT_FAILED = 1


@contextmanager
def shown_errors() -> Iterator[None]:
    """Show an `OrthrosError` as its sentence and end with exit code 1; others are bugs and pass."""
    try:
        yield
    except OrthrosError as error:
        sys.stderr.write(f"Error: {error.message}\n")
        raise typer.Exit(EXIT_FAILED) from None
