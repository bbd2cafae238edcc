"""What a batch job shows: its plan, how far it is, and its report. Never a document's text."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from orthros_service.jobs.plan import JobPlan
from orthros_service.jobs.report import JobReport
from orthros_service.jobs.worker import Advance

_LINE_EVERY_S = 5.0

Show = Callable[[Advance], None]


def plan_lines(plan: JobPlan) -> list[str]:
    """Say what a planned job will read, and what it leaves out."""
    lines = [f"{_count(plan.num_rows, 'row')} in {_count(len(plan.files), 'Parquet file')}"]
    if plan.num_skipped:
        lines.append(f"not read: {_count(plan.num_skipped, 'hidden or foreign file')}")
    lines += [f"left out: {bad.message}" for bad in plan.bad_files]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return lines


@contextmanager
def job_progress(num_rows: int, *, is_quiet: bool) -> Iterator[Show]:
    """Show progress on standard error: a bar on a terminal, lines elsewhere, nothing when quiet."""
    console = Console(stderr=True, markup=False, highlight=False)
    if is_quiet:
        yield lambda _advance: None
    elif console.is_terminal:
        with _bar(console, num_rows) as show:
            yield show
    else:
        yield _Lines(console, num_rows)


@contextmanager
def _bar(console: Console, num_rows: int) -> Iterator[Show]:
    columns = (
        BarColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
    )
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("rows", total=num_rows, state="starting")

        def show(done: Advance) -> None:
            state = _state(done, num_rows, seconds=time.monotonic() - started)
            progress.update(task, completed=done.num_rows, state=state)

        yield show


class _Lines:
    """Writes a line now and then, and always at the end."""

    def __init__(self, console: Console, num_rows: int) -> None:
        self._console = console
        self._num_rows = num_rows
        self._started = time.monotonic()
        self._last = (self._started, -1)

    def __call__(self, done: Advance) -> None:
        now = time.monotonic()
        last_at, last_rows = self._last
        is_due = now - last_at >= _LINE_EVERY_S or done.num_rows >= self._num_rows
        if is_due and done.num_rows != last_rows:
            self._last = (now, done.num_rows)
            self._console.print(
                _state(done, self._num_rows, seconds=now - self._started), soft_wrap=True
            )


def _state(done: Advance, num_rows: int, *, seconds: float) -> str:
    rate = done.num_tokens / seconds if seconds > 0 else 0.0
    # A repeated task may tell of its rows twice; the report counts them once.
    rows = min(done.num_rows, num_rows)
    errors = _count(done.num_failed, "error")
    return f"{rows:,} of {num_rows:,} rows, {rate:,.0f} tokens/s, {errors}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def report_table(report: JobReport) -> Table:
    """Return the report of a job as a table of names and values."""
    table = Table(show_header=False, box=None)
    errors = ", ".join(f"{code} {count:,}" for code, count in report.errors_by_code.items())
    cells = [
        ("rows in, out", f"{report.rows_in:,}, {report.rows_out:,}"),
        ("answered", f"{report.rows_ok:,}"),
        ("errors", f"{report.rows_failed:,}" + (f" ({errors})" if errors else "")),
        ("files left out", f"{len(report.bad_files):,}"),
        (
            "tokens",
            f"{report.document_tokens:,} document, {report.prompt_tokens:,} prompt, "
            f"{report.completion_tokens:,} answer",
        ),
        ("time", f"{report.seconds:,.1f} s, {report.tokens_per_s:,.0f} tokens/s"),
        ("model", f"{report.model} (converted: {str(report.converted).lower()})"),
        ("output", f"{report.spec.output} ({_count(report.files_out, 'file')})"),
    ]
    for name, value in cells:
        table.add_row(name, value)
    return table
