"""What every command does: make a client, turn errors into exit codes, read the user's files."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from orthros_client._config import DEFAULT_READ_TIMEOUT_S
from orthros_client.cli.failures import EXIT_INTERRUPTED, EXIT_USAGE, report
from orthros_client.cli.progress import ingestion_progress, upload_progress
from orthros_client.cli.terminal import Terminal
from orthros_client.client import OrthrosClient
from orthros_client.errors import OrthrosError
from orthros_client.types import Document, PrefillModeChoice

MAX_RETRY_S = 60.0
STDIN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run of one command."""

    client: OrthrosClient
    terminal: Terminal
    timeout_s: float | None

    def upload(
        self, file: str, *, title: str | None = None, mode: PrefillModeChoice = "auto"
    ) -> Document:
        """Upload a file and show how far it is."""
        content = read_input(file, self.terminal)
        if title is None and file != STDIN:
            # A file name may hold bytes that are no text.
            title = Path(file).name.encode("utf-8", "replace").decode("utf-8")
        with upload_progress(self.terminal) as on_sent:
            return self.client.upload(content, title=title, prefill_mode=mode, on_sent=on_sent)

    def wait(self, document_id: str) -> Document:
        """Wait until a document is ready and show how far it is; without --timeout, without end."""
        with ingestion_progress(self.terminal) as on_progress:
            return self.client.wait_until_ready(
                document_id, timeout_s=self.timeout_s, on_progress=on_progress
            )


@contextmanager
def open_session(
    *, url: str, is_json: bool, is_quiet: bool, timeout_s: float | None
) -> Iterator[Session]:
    """Run a command's work; whatever goes wrong inside ends the program with its exit code."""
    terminal = Terminal(is_json=is_json, is_quiet=is_quiet)
    try:
        read_timeout_s = DEFAULT_READ_TIMEOUT_S if timeout_s is None else timeout_s
        with OrthrosClient(
            url,
            read_timeout_s=read_timeout_s,
            max_retry_s=MAX_RETRY_S if timeout_s is None else min(MAX_RETRY_S, timeout_s),
        ) as client:
            yield Session(client=client, terminal=terminal, timeout_s=timeout_s)
    except OrthrosError as error:
        raise typer.Exit(report(error, terminal)) from error
    except KeyboardInterrupt as interrupt:
        terminal.error("Interrupted.")
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt


def read_input(file: str, terminal: Terminal) -> bytes:
    """Read a file or standard input; one that cannot be read ends the program with exit code 2."""
    try:
        if file != STDIN:
            return Path(file).read_bytes()
        if sys.stdin.isatty():
            terminal.note("Reading from the terminal; end the text with Ctrl-D.")
        return sys.stdin.buffer.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        terminal.error(f"Error: The file {file} cannot be read: {reason}.")
        raise typer.Exit(EXIT_USAGE) from error
