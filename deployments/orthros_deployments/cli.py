"""The `orthros` command. Heavy libraries are imported inside the commands that need them."""

from importlib.metadata import version
from typing import Annotated

import typer

from orthros_client.cli import register as register_client
from orthros_deployments.batch_cli import register as register_batch
from orthros_deployments.convert_cli import convert
from orthros_deployments.models_cli import models
from orthros_deployments.serve_cli import serve

app = typer.Typer(
    name="orthros",
    help="Ingest a long document once in linear time, then ask it many times with full attention.",
    epilog="First steps: models prepare, serve; then ingest FILE, ask QUESTION --document ID.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve)
app.command("convert")(convert)
app.add_typer(models, name="models")
register_client(app)
register_batch(app)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"orthros {version('orthros-service')}")
        raise typer.Exit


@app.callback()
def _root(
    is_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()
