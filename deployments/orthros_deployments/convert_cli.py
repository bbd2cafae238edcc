"""The command `orthros convert`."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orthros_deployments.failures import shown_errors

if TYPE_CHECKING:
    from orthros_service.conversion.estimate import Estimate
    from orthros_service.conversion.trainer import StepReport

_EVERY_LINES = 10
_GIB = 2**30


def convert(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="TOML file; docs/conversion.md describes it.")
    ],
    model: Annotated[
        Path | None, typer.Option(help="Model directory to convert.", metavar="DIRECTORY")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run.", metavar="DIRECTORY")
    ] = None,
    device: Annotated[str | None, typer.Option(help="'auto', 'cpu', 'cuda' or 'cuda:N'.")] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(help="Begin with the adapter of another run.", metavar="FILE"),
    ] = None,
) -> None:
    """Convert a Transformer to an Orthros model.

    Run it again with the same file to go on where it was cut.
    """
    with shown_errors():
        from orthros_service.conversion.checkpoint import ADAPTER_FILE
        from orthros_service.conversion.config import load_config
        from orthros_service.conversion.run import convert as run

        changes: dict[str, Any] = {"model": model, "output": output, "device": device}
        chosen = load_config(config, **changes)
        with _display(chosen.training.steps) as display:
            target = run(chosen, adapter=adapter, on_start=display.start, on_step=display.step)
        typer.echo(str(target))
        sys.stderr.write(
            f"Serve it: orthros serve --model {target}\n"
            f"The adapter alone: {chosen.output / ADAPTER_FILE}\n"
        )


def _display(steps: int) -> "_Bar | nullcontext[_Lines]":
    return _Bar(steps) if sys.stderr.isatty() else nullcontext(_Lines(steps))


def _plan(needs: "Estimate", done: int, steps: int) -> str:
    went = f"; going on after step {done:,}" if done else ""
    return (
        f"{needs.num_trainable:,} trainable parameters, {needs.tokens:,} tokens in {steps:,} "
        f"steps, about {needs.memory_bytes / _GIB:.1f} GiB and "
        f"{needs.seconds * (1 - done / steps) / 60:.1f} minutes here{went}"
    )


class _Lines:
    """A line now and then, where there is no terminal."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def start(self, needs: "Estimate", done: int) -> None:
        sys.stderr.write(_plan(needs, done, self._steps) + "\n")

    def step(self, report: "StepReport") -> None:
        if report.step % _EVERY_LINES == 0 or report.step in (1, self._steps):
            left = (self._steps - report.step) * report.tokens / report.step / report.tokens_per_s
            sys.stderr.write(
                f"step {report.step:,} of {self._steps:,}: loss {report.loss:.3f}, "
                f"{report.tokens_per_s:,.0f} tokens/s, {left / 60:.1f} minutes left\n"
            )


class _Bar:
    """A progress bar."""

    def __init__(self, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._steps = steps
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps"),
            TextColumn("{task.fields[state]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("steps", total=steps, state="")

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, needs: "Estimate", done: int) -> None:
        self._progress.console.print(_plan(needs, done, self._steps), markup=False)
        self._progress.update(self._task, completed=done)

    def step(self, report: "StepReport") -> None:
        state = f"loss {report.loss:.3f}, {report.tokens_per_s:,.0f} tokens/s"
        self._progress.update(self._task, completed=report.step, state=state)
