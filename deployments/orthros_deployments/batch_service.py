"""The service that a batch job works through: the one that runs, or one for the time of the job.

Ray is imported inside the functions: `environment.prepare_variables` must come first.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orthros_deployments import environment
from orthros_deployments.app import APP_NAME, start_service, stop_service
from orthros_deployments.local_services import find_services
from orthros_service.errors import UnavailableError
from orthros_service.settings import Settings

_RUNNING = "RUNNING"


@contextmanager
def running_service(
    settings: Settings, *, can_start: bool, tell: Callable[[str], None]
) -> Iterator[None]:
    """Connect this process to a service for the time of the block.

    A service that runs on the Ray cluster of the settings, or else on this machine's, is used and
    left running. Without one, a service is started and stopped again at the end.

    Args:
        settings: All settings.
        can_start: Whether to start a service when none runs.
        tell: Told which service it is.

    Raises:
        UnavailableError: None runs and none may be started, or it did not come up.
        ModelError: The model of a service to start is missing.
    """
    environment.prepare_variables(settings)
    import ray

    status = _join(settings)
    if status == _RUNNING:
        tell(f"using the service that runs on Ray at {ray.get_runtime_context().gcs_address}")
        try:
            yield
        finally:
            ray.shutdown()
        return
    # A service that is there and does not run is not ours to replace.
    is_taken = status is not None and settings.deployment.ray_address is not None
    if not can_start or is_taken:
        ray.shutdown()
        raise UnavailableError(
            f"No service runs here{_found(status)}. Start one with `orthros serve`; if it is on "
            "another cluster, set ORTHROS_DEPLOYMENT__RAY_ADDRESS to the address that it prints; "
            "or leave out --no-start-service to have one for the time of the job."
        )
    tell(f"no service runs here{_found(status)}; starting one for the time of the job")
    running = start_service(_for_one_job(settings), is_announced=False)
    try:
        yield
    finally:
        stop_service(running)


def _found(status: str | None) -> str:
    return "" if status is None else f" (the one found is {status})"


def _join(settings: Settings) -> str | None:
    """Connect to the cluster whose service is to be used.

    Returns:
        The status of the service there. With any but RUNNING this process stays connected only to
        a cluster that the settings name, where a service may then be started.

    Raises:
        UnavailableError: There is no cluster at the address in the settings, or several services
            run here and the settings name none.
    """
    import ray
    from ray import serve

    address = settings.deployment.ray_address
    if address is None:
        found = find_services()
        if not found:
            return None
        if len(found) > 1:
            raise UnavailableError(
                f"{len(found)} services run on this machine, on Ray at {', '.join(found)}; set "
                "ORTHROS_DEPLOYMENT__RAY_ADDRESS to the one to use."
            )
        (joined,) = found
    else:
        environment.require_cluster(address)
        joined = address
    # Serve's notes on its own connections would stand between the lines of the job.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        ray.init(address=joined, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        if address is None:
            return None
        raise environment.no_cluster(address) from error
    application = serve.status().applications.get(APP_NAME)
    status = None if application is None else application.status.value
    if address is None and status != _RUNNING:
        ray.shutdown()
    return status


def _for_one_job(settings: Settings) -> Settings:
    # Nobody calls this service over HTTP, so it takes a port that is in nobody's way, and what it
    # does is told by the job's own progress.
    gateway = settings.gateway.model_copy(update={"port": _free_port()})
    log = settings.log
    if log.level == "INFO":
        log = log.model_copy(update={"level": "WARNING"})
    return settings.model_copy(update={"gateway": gateway, "log": log})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
