"""What went wrong on the other side of a Ray call, as one of our own errors."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ray import exceptions as ray_errors
from ray.serve import exceptions as serve_errors

from orthros_service.errors import (
    CancelledError,
    EngineError,
    OrthrosError,
    OverloadedError,
    StateError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

_BACKPRESSURE_RETRY_S = 2.0

_WORKER_LOST = (
    ray_errors.RayActorError,
    ray_errors.WorkerCrashedError,
    ray_errors.NodeDiedError,
    ray_errors.LocalRayletDiedError,
    ray_errors.ActorUnschedulableError,
    ray_errors.TaskUnschedulableError,
    ray_errors.OutOfMemoryError,
    ray_errors.RpcError,
    serve_errors.DeploymentUnavailableError,
    serve_errors.ReplicaUnavailableError,
)
_STATE_UNREACHABLE = (ray_errors.OwnerDiedError, ray_errors.GetTimeoutError)


def to_orthros_error(error: Exception, *, phase: str) -> OrthrosError:
    """Translate an error of a Ray call.

    Args:
        error: What the call raised.
        phase: What the caller was doing: "prefill", "handoff" or "decode".

    Returns:
        The remote `OrthrosError` itself if there was one; `UnavailableError` for what a new try may
        cure, `StateError` for a state that is gone, `EngineError` for the rest, which is logged.
    """
    if isinstance(error, ray_errors.RayTaskError):
        cause = error.cause
        if isinstance(cause, Exception) and cause is not error:
            return to_orthros_error(cause, phase=phase)
    if isinstance(error, OrthrosError):
        return error
    translated = _translate(error, phase)
    translated.__cause__ = error
    return translated


def _translate(error: Exception, phase: str) -> OrthrosError:
    if isinstance(error, serve_errors.BackPressureError):
        return OverloadedError(
            "The workers' queue is full; send the request again in a moment.",
            phase=phase,
            retry_after_s=_BACKPRESSURE_RETRY_S,
        )
    if isinstance(error, _WORKER_LOST):
        logger.warning("a %s worker was lost: %s", phase, type(error).__name__)
        return UnavailableError(
            f"The worker in the {phase} phase died or cannot be reached; send the request again.",
            phase=phase,
        )
    if isinstance(error, _STATE_UNREACHABLE):
        logger.warning("a state cannot be reached: %s", type(error).__name__)
        return UnavailableError(
            "The document's state cannot be reached at the moment; send the request again.",
            phase=phase,
        )
    if isinstance(error, ray_errors.ObjectLostError):
        logger.warning("a state is lost: %s", type(error).__name__)
        return StateError("The document's state is gone; ingest the document again.", phase=phase)
    if isinstance(error, ray_errors.TaskCancelledError):
        return CancelledError("The work was cancelled.", phase=phase)
    if isinstance(error, (ray_errors.ObjectStoreFullError, ray_errors.OutOfDiskError)):
        logger.warning("the object store is full: %s", type(error).__name__)
        return OverloadedError(
            "There is no room for another state at the moment; send the request again later, or "
            "delete documents.",
            phase=phase,
            retry_after_s=_BACKPRESSURE_RETRY_S,
        )
    logger.error("unexpected error in the %s phase", phase, exc_info=error)
    return EngineError(f"The {phase} phase failed: {type(error).__name__}.", phase=phase)


@contextmanager
def orthros_errors(phase: str) -> Iterator[None]:
    """Translate every error inside; cancellation passes."""
    try:
        yield
    except (OrthrosError, asyncio.CancelledError) as error:
        # Ray raises remote errors as a class made of both; callers get the plain one.
        if isinstance(error, ray_errors.RayTaskError):
            raise to_orthros_error(error, phase=phase) from None
        raise
    except Exception as error:
        raise to_orthros_error(error, phase=phase) from error
