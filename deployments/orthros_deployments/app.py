"""The service as one Ray Serve application: how it is built, started and stopped.

Ray is imported inside the functions: `environment.prepare` must come first, and `--help` be quick.
"""

import logging
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthros_deployments import environment
from orthros_deployments.local_services import announce, withdraw
from orthros_deployments.stopping import delete_app, drain, withdraw_app
from orthros_service import errors
from orthros_service.errors import InvalidValueError, OrthrosError, UnavailableError
from orthros_service.settings import Settings
from orthros_service.types import ModelInfo

if TYPE_CHECKING:
    from ray.serve import Application

logger = logging.getLogger(__name__)

APP_NAME = "orthros"

_SMALL_CPUS = 0.1
_HEALTH_PERIOD_S = 5.0
_HEALTH_TIMEOUT_S = 10.0
# Requests wait in our own queues, where they are counted and can be cancelled.
_MANY_REQUESTS = 1000
_KEEP_ALIVE_S = 90
_OUR_ERROR = re.compile(r"orthros_service\.errors\.(\w+): (.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """A service that answers.

    Args:
        url: Where.
        model: What it serves.
        ray_address: Address of its Ray cluster, for other processes that want to join.
        owns_ray: Whether stopping the service stops Ray too.
        shutdown_timeout_s: Seconds that running requests have to finish.
        note: Where this machine's other commands find its Ray address; None if they do not.
    """

    url: str
    model: ModelInfo
    ray_address: str
    owns_ray: bool
    shutdown_timeout_s: float
    note: Path | None = None


def build_app(settings: Settings) -> "Application":
    """The four deployments, bound to one another; nothing starts yet.

    Args:
        settings: All settings; relative paths in them are relative to this process.
    """
    from ray import serve

    from orthros_deployments.coordinator import Coordinator
    from orthros_deployments.decode import Decode
    from orthros_deployments.gateway import Gateway
    from orthros_deployments.prefill import Prefill

    settings = environment.with_absolute_paths(settings)
    layout = settings.deployment
    common: dict[str, Any] = {
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": layout.shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
    small = {"num_cpus": _SMALL_CPUS}
    worker = {
        "num_cpus": layout.worker_cpus,
        "runtime_env": {"env_vars": environment.WORKER_VARIABLES},
    }
    prefill = serve.deployment(
        name="Prefill",
        num_replicas=layout.num_prefill_workers,
        max_ongoing_requests=_MANY_REQUESTS,
        ray_actor_options=worker,
        **common,
    )(Prefill).bind(settings)
    decode = serve.deployment(
        name="Decode",
        num_replicas=layout.num_decode_workers,
        max_ongoing_requests=_MANY_REQUESTS,
        ray_actor_options=worker,
        **common,
    )(Decode).bind(settings)
    coordinator = serve.deployment(
        name="Coordinator",
        num_replicas=1,
        max_ongoing_requests=_MANY_REQUESTS,
        ray_actor_options=small,
        **common,
    )(Coordinator).bind(settings, prefill)
    return serve.deployment(
        name="Gateway",
        num_replicas=layout.num_gateways,
        max_ongoing_requests=_MANY_REQUESTS,
        ray_actor_options=small,
        **common,
    )(Gateway).bind(settings, coordinator=coordinator, prefill=prefill, decode=decode)


def start_service(
    settings: Settings, *, block: bool = False, is_announced: bool = True
) -> RunningService:
    """Start the service and wait until it answers.

    Starts a Ray on this machine unless this process is connected to one, or the settings name one.

    Args:
        settings: All settings.
        block: Return only after SIGINT or SIGTERM, the service having been stopped.
        is_announced: Whether other commands of this user may find it.

    Raises:
        ModelError: The model directory is missing or damaged.
        InvalidValueError: The port is taken.
        UnavailableError: The deployments did not come up.
    """
    environment.check_startable(settings)
    owns_ray = environment.connect_ray(settings)
    try:
        running = _run(settings, owns_ray=owns_ray)
    except BaseException:
        if not owns_ray:
            withdraw_app(APP_NAME)
        _disconnect(owns_ray=owns_ray)
        raise
    if is_announced:
        running = replace(running, note=announce(running.ray_address))
    if block:
        environment.wait_for_signal()
        stop_service(running)
    return running


def stop_service(running: RunningService) -> None:
    """Let running requests finish, stop what `start_service` started and free the port.

    Ctrl-C while it waits ends the wait and cuts off what still runs.
    """
    withdraw(running.note)
    timeout_s = running.shutdown_timeout_s
    try:
        drain(APP_NAME, timeout_s=timeout_s)
        delete_app(APP_NAME, timeout_s=timeout_s)
    except KeyboardInterrupt:
        logger.warning("interrupted while stopping: what still runs is cut off")
    finally:
        _disconnect(owns_ray=running.owns_ray)


def _run(settings: Settings, *, owns_ray: bool) -> RunningService:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import LoggingConfig

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(
        proxy_location="HeadOnly",
        http_options=HTTPOptions(
            host=settings.gateway.host,
            port=settings.gateway.port,
            request_timeout_s=None,
            keep_alive_timeout_s=_KEEP_ALIVE_S,
        ),
        logging_config=quiet,
    )
    started_at = time.monotonic()
    app = build_app(_fit_states(settings))
    try:
        serve.run(app, name=APP_NAME, route_prefix="/", logging_config=quiet)
    except RuntimeError as error:
        raise _start_failure() from error
    model = _wait_ready()
    logger.info("the deployments came up in %.1f s", time.monotonic() - started_at)
    host = settings.gateway.host
    shown = f"[{host}]" if ":" in host else {"0.0.0.0": "127.0.0.1"}.get(host, host)  # noqa: S104
    return RunningService(
        url=f"http://{shown}:{settings.gateway.port}",
        model=model,
        ray_address=ray.get_runtime_context().gcs_address,
        owns_ray=owns_ray,
        shutdown_timeout_s=settings.deployment.shutdown_timeout_s,
    )


def _fit_states(settings: Settings) -> Settings:
    """Keep no more states than the cluster's object store holds beside those being made."""
    import ray

    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    store_bytes = int(resources.get("object_store_memory", 0))
    fitting = store_bytes * 2 // 3
    if not 0 < fitting < settings.state.memory_bytes:
        return settings
    logger.warning(
        "state.memory_bytes=%d does not fit the object store of %d bytes, set to %d",
        settings.state.memory_bytes,
        store_bytes,
        fitting,
    )
    state = settings.state.model_copy(update={"memory_bytes": fitting})
    return settings.model_copy(update={"state": state})


def _start_failure() -> OrthrosError:
    """Why the deployments did not come up: the replicas' own error where they had one."""
    from ray import serve

    status = serve.status().applications[APP_NAME]
    messages = [each.message for each in status.deployments.values()]
    for message in messages:
        if found := _OUR_ERROR.search(message):
            kind = getattr(errors, found[1], UnavailableError)
            assert issubclass(kind, OrthrosError)
            return kind(found[2])
    logger.error("the deployments' last words: %s", "\n".join(messages))
    return UnavailableError(
        f"The deployments did not come up: {status.message} The log has the details."
    )


def _wait_ready() -> ModelInfo:
    import asyncio

    from orthros_deployments.backend import connect_backend

    async def ask() -> ModelInfo:
        return await connect_backend(APP_NAME).model_info()

    return asyncio.run(ask())


def _disconnect(*, owns_ray: bool) -> None:
    import ray

    if owns_ray:
        ray.shutdown()


def from_config(args: dict[str, Any]) -> "Application":
    """Builder for `serve deploy`: settings from the environment, overridden by the file's `args`.

    Args:
        args: Groups of settings by name.

    Raises:
        InvalidValueError: A setting is unknown or has a value that is not allowed.
    """
    try:
        settings = Settings(**args)
    except ValueError as error:
        raise InvalidValueError(f"The settings are not valid: {error}") from error
    return build_app(settings)
