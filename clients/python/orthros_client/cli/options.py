"""The options that commands share."""

import math
from typing import Annotated

import typer

from orthros_client._config import DEFAULT_BASE_URL

URL_VARIABLE = "ORTHROS_CLIENT_URL"


def _check_seconds(value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter("give a number of seconds above 0")
    return value


UrlOption = Annotated[
    str, typer.Option("--url", envvar=URL_VARIABLE, help="Address of the service.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object; notes go to stderr.")
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        callback=_check_seconds,
        help="Longest wait for each thing asked of the service: a reply, an ingestion, an answer.",
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Leave out progress, notes and timings.")
]
FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="A UTF-8 text file, or - for standard input.")
]
DocumentIdArgument = Annotated[str, typer.Argument(metavar="ID", help="The document's id.")]
DocumentsOption = Annotated[
    list[str] | None,
    typer.Option("--document", "-d", metavar="ID", help="A document to read; may be repeated."),
]
FileOption = Annotated[
    str | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="A UTF-8 text file (or -) to upload first; it stays stored.",
    ),
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Most tokens to write.")
]
InstructionsOption = Annotated[
    str | None, typer.Option("--instructions", help="How to answer, for example in which language.")
]
CitationsOption = Annotated[
    bool, typer.Option("--citations/--no-citations", help="Show the passages behind the answer.")
]

DEFAULT_URL = DEFAULT_BASE_URL
