"""The command line itself: which commands there are and under which names."""

from collections.abc import Callable

import typer

from orthros_client.cli import manual
from orthros_client.cli.answers import ask, summarize
from orthros_client.cli.documents import (
    count,
    delete_document,
    get_document,
    ingest,
    list_documents,
)

PROGRAM = "orthros-client"

_Command = Callable[..., None]
_COMMANDS: tuple[tuple[str, _Command, str], ...] = (
    ("ingest", ingest, manual.INGEST),
    ("ask", ask, manual.ASK),
    ("summarize", summarize, manual.SUMMARIZE),
    ("count", count, manual.COUNT),
)
_DOCUMENT_COMMANDS: tuple[tuple[str, _Command, str], ...] = (
    ("list", list_documents, manual.DOCUMENTS_LIST),
    ("get", get_document, manual.DOCUMENTS_GET),
    ("delete", delete_document, manual.DOCUMENTS_DELETE),
)


def register(parent: typer.Typer, *, program: str = "orthros") -> None:
    """Add ingest, ask, summarize, documents and count to an app.

    Args:
        parent: The app that gets the commands.
        program: Its name on the command line, for the examples of `--help`.
    """

    def describe(text: str) -> str:
        return text.strip().replace("{program}", program)

    for name, command, text in _COMMANDS:
        parent.command(name, help=describe(text), epilog=manual.EXIT_CODES)(command)
    documents = typer.Typer(no_args_is_help=True, rich_markup_mode=parent.rich_markup_mode)
    for name, command, text in _DOCUMENT_COMMANDS:
        documents.command(name, help=describe(text), epilog=manual.EXIT_CODES)(command)
    parent.add_typer(documents, name="documents", help=manual.DOCUMENTS)


app = typer.Typer(
    name=PROGRAM,
    help=manual.APP.strip().replace("{program}", PROGRAM),
    epilog=manual.EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
register(app, program=PROGRAM)


def main() -> None:
    """Run the command line."""
    app()
