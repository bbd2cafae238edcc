r"""The command `orthros batch run`.

Ray is imported only after the job was planned: what can be refused is refused within a second.
A line of help that holds only \b keeps the paragraph below it as it is written.
"""

import json
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console

from orthros_deployments.batch_display import job_progress, plan_lines, report_table
from orthros_deployments.batch_service import running_service
from orthros_service.errors import OrthrosError
from orthros_service.jobs import JobPlan, JobReport, JobSpec, build_spec, make_plan
from orthros_service.jobs.output import prepare_output
from orthros_service.settings import Settings, load_settings
from orthros_service.types import PrefillModeChoice

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_ROW_ERRORS = 3
EXIT_INTERRUPTED = 130

_HELP = "Work through Parquet files with the deployments of the service."

_RUN_HELP = """
Ask a question about the text of every row of Parquet files, or summarize each.

Every input row comes out exactly once, with its columns unchanged and the answer, citations, token
counts, times and errors beside them. A row that cannot be answered comes out with an error_code; it
never stops the job. Give exactly one of --question, --question-column and --summarize.

\b
Examples:
  orthros batch run --input docs.parquet --output out --question "Who wrote this?"
  orthros batch run --input folder/ --output out --summarize --text-column body
  orthros batch run --input qa.parquet --output out --question-column question --json
"""

_EXIT_CODES = """
\b
Exit codes:
  0    every row was answered
  1    the job failed; the output has no _SUCCESS and must not be used
  2    refused before any work; the message says what to change
  3    finished, with error rows or left-out files; see the column error_code
  130  interrupted
"""


def register(parent: typer.Typer) -> None:
    """Add the group `batch` to an app."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=parent.rich_markup_mode)
    group.command("run", help=_RUN_HELP.strip(), epilog=_EXIT_CODES)(run)
    parent.add_typer(group, name="batch", help=_HELP)
    # With a callback the group stays a group, though it has one command so far.
    group.callback()(_group)


def _group() -> None:
    pass


def run(
    input_path: Annotated[
        str, typer.Option("--input", metavar="PATH", help="A Parquet file, or a folder of them.")
    ],
    output: Annotated[
        str, typer.Option("--output", metavar="DIR", help="Folder for the results; new or empty.")
    ],
    question: Annotated[
        str | None, typer.Option("--question", help="One question for every row.")
    ] = None,
    question_column: Annotated[
        str | None, typer.Option("--question-column", metavar="COL", help="Column of questions.")
    ] = None,
    summarize: Annotated[
        bool, typer.Option("--summarize", help="Summarize each document instead.")
    ] = False,
    text_column: Annotated[
        str, typer.Option("--text-column", metavar="COL", help="Column of the documents.")
    ] = "text",
    id_column: Annotated[
        str | None,
        typer.Option("--id-column", metavar="COL", help="Your ids: nulls, repeats are reported."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Most tokens per answer.")
    ] = 64,
    prefill_mode: Annotated[
        PrefillModeChoice, typer.Option("--prefill-mode", help="How documents are read.")
    ] = "auto",
    citations: Annotated[
        bool, typer.Option("--citations/--no-citations", help="Find the passages behind answers.")
    ] = True,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Rows in flight at once.")
    ] = 8,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Take only the first rows.")
    ] = None,
    skip_bad_files: Annotated[
        bool, typer.Option("--skip-bad-files", help="Go on without files that cannot be read.")
    ] = False,
    start_service: Annotated[
        bool,
        typer.Option(
            "--start-service/--no-start-service",
            help="Start a service for this job when none runs.",
        ),
    ] = True,
    is_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object.")
    ] = False,
    is_quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Leave out the plan and the progress.")
    ] = False,
) -> None:
    """Plan the job, find or start the service, run the job, show its report."""
    face = _Face(is_json=is_json, is_quiet=is_quiet)
    try:
        settings = load_settings()
        spec = build_spec(
            input=input_path,
            output=output,
            question=question,
            question_column=question_column,
            summarize=summarize,
            text_column=text_column,
            id_column=id_column,
            max_tokens=max_tokens,
            prefill_mode=prefill_mode,
            citations=citations,
            concurrency=concurrency,
            limit=limit,
            skip_bad_files=skip_bad_files,
            max_document_bytes=settings.documents.max_bytes,
        )
        plan = make_plan(spec)
        prepare_output(spec.output_path)
    except OrthrosError as error:
        raise typer.Exit(face.fail(error, EXIT_REFUSED)) from error
    for line in plan_lines(plan):
        face.note(line)
    try:
        report = _execute(spec, plan, settings, face, can_start=start_service)
    except KeyboardInterrupt as interrupt:
        face.note("Interrupted; the output has no _SUCCESS and must not be used.")
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt
    face.show(report)
    if not report.is_complete:
        raise typer.Exit(EXIT_ROW_ERRORS)


def _execute(
    spec: JobSpec, plan: JobPlan, settings: Settings, face: "_Face", *, can_start: bool
) -> JobReport:
    with ExitStack() as stack:
        try:
            stack.enter_context(running_service(settings, can_start=can_start, tell=face.note))
        except OrthrosError as error:
            raise typer.Exit(face.fail(error, EXIT_REFUSED)) from error
        try:
            from orthros_deployments.batch import run_batch

            with job_progress(plan.num_rows, is_quiet=face.is_quiet) as show:
                return run_batch(spec, plan, on_progress=show)
        except OrthrosError as error:
            raise typer.Exit(face.fail(error, EXIT_FAILED)) from error


class _Face:
    """Results on standard output, everything else on standard error."""

    def __init__(self, *, is_json: bool, is_quiet: bool) -> None:
        self._is_json = is_json
        self.is_quiet = is_quiet
        self._out = Console(markup=False, highlight=False)
        self._err = Console(stderr=True, markup=False, highlight=False)

    def note(self, text: str) -> None:
        if not self.is_quiet:
            self._err.print(text, soft_wrap=True)

    def fail(self, error: OrthrosError, exit_code: int) -> int:
        self._err.print(f"Error: {error.message}", soft_wrap=True)
        self._err.print(f"  code: {error.code}", soft_wrap=True)
        if self._is_json:
            self._object(
                {
                    "object": "error",
                    "code": error.code,
                    "message": error.message,
                    "exit_code": exit_code,
                }
            )
        return exit_code

    def show(self, report: JobReport) -> None:
        if self._is_json:
            self._object({"object": "batch.report", **report.model_dump(mode="json")})
        else:
            self._out.print(report_table(report))

    def _object(self, content: dict[str, Any]) -> None:
        typer.echo(json.dumps(content, ensure_ascii=True))
