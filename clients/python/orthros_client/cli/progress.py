"""Progress on standard error: a bar on a terminal, lines elsewhere, nothing when quiet."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from orthros_client.cli.terminal import Terminal
from orthros_client.types import Document

LINE_INTERVAL_S = 2.0
KIB = 1024
MIB = 1024 * KIB

Show = Callable[[int, int | None, str], None]


@contextmanager
def upload_progress(terminal: Terminal) -> Iterator[Callable[[int, int], None]]:
    """Show how much of a file was sent; yields the callback for `upload`."""
    with _display(terminal, "uploading") as show:

        def on_sent(sent: int, total: int) -> None:
            unit, name = (MIB, "MiB") if total >= MIB else (KIB, "KiB")
            show(sent, total, f"{sent / unit:.1f} of {total / unit:.1f} {name}")

        yield on_sent


@contextmanager
def ingestion_progress(terminal: Terminal) -> Iterator[Callable[[Document], None]]:
    """Show how many tokens were read; yields the callback for `wait_until_ready`."""
    with _display(terminal, "reading") as show:

        def on_progress(document: Document) -> None:
            prefill = document.prefill
            if document.status == "queued" or prefill.tokens_total is None:
                show(prefill.tokens_done, None, document.status)
                return
            rate = "" if prefill.tokens_per_s is None else f", {prefill.tokens_per_s:,.0f} tokens/s"
            state = f"{prefill.tokens_done:,} of {prefill.tokens_total:,} tokens{rate}"
            show(prefill.tokens_done, prefill.tokens_total, state)

        yield on_progress


@contextmanager
def _display(terminal: Terminal, action: str) -> Iterator[Show]:
    console = Console(stderr=True, markup=False, highlight=False)
    if terminal.is_quiet:
        yield lambda _done, _total, _state: None
    elif console.is_terminal:
        with _bar(console, action) as show:
            yield show
    else:
        yield _Lines(terminal, action)


@contextmanager
def _bar(console: Console, action: str) -> Iterator[Show]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task: TaskID = progress.add_task(action, total=None, state="")

        def show(done: int, total: int | None, state: str) -> None:
            progress.update(task, completed=done, total=total, state=state)

        yield show


class _Lines:
    """Writes a line when enough time has passed since the last one, and always at the end."""

    def __init__(self, terminal: Terminal, action: str) -> None:
        self._terminal = terminal
        self._action = action
        self._last_at: float | None = None
        self._last_state = ""

    def __call__(self, done: int, total: int | None, state: str) -> None:
        now = time.monotonic()
        is_due = self._last_at is None or now - self._last_at >= LINE_INTERVAL_S
        if state != self._last_state and (is_due or done == total):
            self._last_at = now
            self._last_state = state
            self._terminal.note(f"{self._action}: {state}")
