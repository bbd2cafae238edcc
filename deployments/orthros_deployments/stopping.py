"""How a service on Ray Serve ends: refuse new work, let answers finish, take the replicas down.

Ray is imported inside the functions, as in `app`.
"""

import logging
import time

logger = logging.getLogger(__name__)

_STOP_MARGIN_S = 10.0
_LOOK_EVERY_S = 0.2
_PIECE_S = 0.5


def drain(app_name: str, *, timeout_s: float) -> None:
    """Have the gateways refuse new work and wait until running answers have ended."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        gateways = serve.get_deployment_handle("Gateway", app_name)
        deadline = time.monotonic() + timeout_s
        # In short calls: a signal is seen only between them.
        while not all(gateways.broadcast("drain", _PIECE_S).results(timeout_s=_STOP_MARGIN_S)):
            if time.monotonic() > deadline:
                logger.warning("requests still ran after %g s and are cut off", timeout_s)
                return
    except (RayError, RayServeException, TimeoutError, RuntimeError) as error:
        # Stopping goes on whatever state the service is in.
        logger.warning("the gateways could not be drained: %s: %s", type(error).__name__, error)


def withdraw_app(app_name: str) -> None:
    """Take down what a start that failed has left on the cluster."""
    import ray
    from ray import serve

    if ray.is_initialized():
        serve.delete(app_name, _blocking=False)


def delete_app(app_name: str, *, timeout_s: float) -> None:
    """Have Serve stop the replicas; Serve's own wait for it gives up at a minute."""
    from ray import serve

    serve.delete(app_name, _blocking=False)
    deadline = time.monotonic() + timeout_s + _STOP_MARGIN_S
    while app_name in serve.status().applications:
        if time.monotonic() > deadline:
            logger.warning("replicas did not stop within %g s and are killed", timeout_s)
            return
        time.sleep(_LOOK_EVERY_S)
