"""The command `orthros serve`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from orthros_deployments.failures import shown_errors
from orthros_service.settings import Settings, load_settings


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", metavar="ADDRESS")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="TCP port to listen on.", metavar="PORT")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory to serve.", metavar="DIRECTORY")
    ] = None,
) -> None:
    """Start the service on this machine and run until Ctrl-C.

    Options win over the environment's ORTHROS_* settings; docs/settings.md lists them all.
    """
    with shown_errors():
        settings = _with_options(load_settings(), host=host, port=port, model=model)
        _serve(settings)


def _with_options(
    settings: Settings, *, host: str | None, port: int | None, model: Path | None
) -> Settings:
    gateway = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    groups: dict[str, object] = {"gateway": settings.gateway.model_copy(update=gateway)}
    if model is not None:
        groups["model"] = settings.model.model_copy(update={"directory": model})
    return settings.model_copy(update=groups)


def _serve(settings: Settings) -> None:
    from orthros_deployments import environment
    from orthros_deployments.app import start_service, stop_service
    from orthros_service.telemetry import configure_logging

    configure_logging(settings.log)
    sys.stderr.write(
        f"Starting {settings.model.directory.absolute()}; this takes half a minute.\n"
        f"Documents and states: {', '.join(environment.data_places(settings))}\n"
    )
    running = start_service(settings)
    model = running.model
    sys.stdout.write(
        f"Orthros serves {model.name} at {running.url}\n"
        f"  converted: {str(model.is_converted).lower()}, {model.dtype}, full attention up to "
        f"{model.full_prefill_max_tokens} document tokens, linear prefill beyond\n"
        f"  API: {running.url}/openapi.json   metrics: {running.url}/metrics\n"
        f"  Ray: {running.ray_address}   Ctrl-C stops it\n"
    )
    sys.stdout.flush()
    environment.wait_for_signal()
    sys.stderr.write(
        "Stopping; running requests may finish, for up to "
        f"{settings.deployment.shutdown_timeout_s:g} s. Ctrl-C again ends them.\n"
    )
    with environment.interrupted_by_signals():
        stop_service(running)
