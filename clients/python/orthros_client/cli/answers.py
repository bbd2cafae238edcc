"""The commands that write text: ask and summarize."""

from typing import Annotated, Literal

import typer

from orthros_client.cli.options import (
    DEFAULT_URL,
    CitationsOption,
    DocumentsOption,
    FileOption,
    InstructionsOption,
    JsonOption,
    MaxTokensOption,
    QuietOption,
    TimeoutOption,
    UrlOption,
)
from orthros_client.cli.session import Session, open_session
from orthros_client.cli.terminal import Terminal, one_line
from orthros_client.options import AskOptions, GenerationOptions, SummaryOptions
from orthros_client.streams import AnswerStream
from orthros_client.types import Answer

QuestionArgument = Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.")]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", min=0.0, max=2.0, help="0 is repeatable.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Makes chance repeatable.")]
StyleOption = Annotated[
    Literal["paragraph", "bullets", "one_sentence"], typer.Option("--style", help="Its form.")
]
FocusOption = Annotated[
    str | None, typer.Option("--focus", help="What the summary should be about.")
]


def ask(
    question: QuestionArgument,
    document: DocumentsOption = None,
    file: FileOption = None,
    instructions: InstructionsOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    citations: CitationsOption = True,
    url: UrlOption = DEFAULT_URL,
    json: JsonOption = False,
    timeout: TimeoutOption = None,
    quiet: QuietOption = False,
) -> None:
    """Ask a question about documents."""
    _check_source(document, file)
    with open_session(url=url, is_json=json, is_quiet=quiet, timeout_s=timeout) as session:
        options = AskOptions(document_ids=_ready_documents(session, document, file))
        _fill(options, session, max_tokens, instructions, is_citing=citations)
        if temperature is not None:
            options["temperature"] = temperature
        if seed is not None:
            options["seed"] = seed
        if json:
            session.terminal.object(session.client.ask(question, **options))
        else:
            _show(session.client.ask_stream(question, **options), session.terminal)


def summarize(
    document: DocumentsOption = None,
    file: FileOption = None,
    style: StyleOption = "paragraph",
    focus: FocusOption = None,
    instructions: InstructionsOption = None,
    max_tokens: MaxTokensOption = None,
    citations: CitationsOption = True,
    url: UrlOption = DEFAULT_URL,
    json: JsonOption = False,
    timeout: TimeoutOption = None,
    quiet: QuietOption = False,
) -> None:
    """Summarize documents."""
    _check_source(document, file)
    with open_session(url=url, is_json=json, is_quiet=quiet, timeout_s=timeout) as session:
        options = SummaryOptions(document_ids=_ready_documents(session, document, file))
        _fill(options, session, max_tokens, instructions, is_citing=citations)
        options["style"] = style
        if focus is not None:
            options["focus"] = focus
        if json:
            session.terminal.object(session.client.summarize(**options))
        else:
            _show(session.client.summarize_stream(**options), session.terminal)


def _check_source(document_ids: list[str] | None, file: str | None) -> None:
    if bool(document_ids) == (file is not None):
        raise typer.BadParameter(
            "give either --document ID (once or more) or --file FILE",
            param_hint="--document / --file",
        )


def _ready_documents(
    session: Session, document_ids: list[str] | None, file: str | None
) -> list[str]:
    if file is not None:
        document = session.upload(file)
        session.terminal.note(f"Stored as {document.id}; ask again with --document {document.id}.")
        document_ids = [document.id]
    for document_id in document_ids or []:
        session.wait(document_id)
    return document_ids or []


def _fill(
    options: GenerationOptions,
    session: Session,
    max_tokens: int | None,
    instructions: str | None,
    *,
    is_citing: bool,
) -> None:
    options["citations"] = is_citing
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if instructions is not None:
        options["instructions"] = instructions
    if session.timeout_s is not None:
        options["deadline_s"] = session.timeout_s


def _show(stream: AnswerStream, terminal: Terminal) -> None:
    with stream:
        try:
            for delta in stream:
                terminal.write(delta.text)
        finally:
            if stream.text and not stream.text.endswith("\n"):
                terminal.line()
    _show_citations(stream.answer, terminal)
    if not terminal.is_quiet:
        _show_facts(stream.answer, terminal)


def _show_citations(answer: Answer, terminal: Terminal) -> None:
    if answer.citations:
        terminal.line()
    for number, citation in enumerate(answer.citations, start=1):
        where = citation.document_id or "text"
        span = f"{citation.start_char}-{citation.end_char}"
        terminal.line(f'[{number}] {one_line(where)} {span}: "{one_line(citation.quote)}"')


def _show_facts(answer: Answer, terminal: Terminal) -> None:
    usage, timings = answer.usage, answer.timings
    terminal.line()
    terminal.line(
        f"{one_line(answer.model)} (converted: {str(answer.converted).lower()}), "
        f"{usage.document_tokens:,} document + {usage.prompt_tokens:,} prompt + "
        f"{usage.completion_tokens:,} written tokens, ended by {answer.finish_reason}"
    )
    terminal.line(
        f"queue {timings.queue_s:.2f} s, prefill {timings.prefill_s:.2f} s, "
        f"hand-off {timings.handoff_s:.2f} s, first token {timings.first_token_s:.2f} s, "
        f"decode {timings.decode_s:.2f} s, total {timings.total_s:.2f} s"
    )
    for warning in answer.warnings:
        terminal.line(f"Warning: {one_line(warning)}")
