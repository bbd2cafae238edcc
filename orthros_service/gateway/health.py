"""Whether the process lives, whether the service can work, and its numbers."""

import asyncio
import logging
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from orthros_service.errors import UnavailableError
from orthros_service.gateway.context import GatewayContext, StoppingError, get_context
from orthros_service.gateway.openapi import problems
from orthros_service.telemetry import CONTENT_TYPE

logger = logging.getLogger(__name__)

router = APIRouter(tags=["operations"])
Context = Annotated[GatewayContext, Depends(get_context)]

_CHECK_TIMEOUT_S = 5.0


@router.get("/healthz", name="healthz", summary="Whether the process answers")
async def healthz() -> dict[str, str]:
    """Always 200 while the process answers; says nothing of the workers."""
    return {"status": "ok", "version": version("orthros-service")}


@router.get(
    "/readyz",
    name="readyz",
    summary="Whether documents and questions can be worked on",
    responses=problems(503),
)
async def readyz(context: Context) -> Response:
    """Return 200 when at least one prefill and one decode worker and the catalogue answer."""
    if context.draining.is_set():
        raise StoppingError("The service is stopping.", retry_after_s=2)
    are_workers_ready, is_catalog_ready = await asyncio.gather(
        _are_workers_ready(context), _is_catalog_ready(context)
    )
    checks = {"workers": are_workers_ready, "catalog": is_catalog_ready}
    if not all(checks.values()):
        failing = " and ".join(name for name, is_ready in checks.items() if not is_ready)
        raise UnavailableError(f"The {failing} did not answer; ask again.", retry_after_s=2)
    return JSONResponse({"status": "ready", "checks": checks})


@router.get(
    "/metrics",
    name="metrics",
    summary="Metrics in Prometheus' text format",
    response_class=PlainTextResponse,
)
async def metrics(context: Context) -> Response:
    """Everything that `orthros_*` metrics count; see docs for their names and labels."""
    return Response(await context.metrics_text(), media_type=CONTENT_TYPE)


async def _are_workers_ready(context: GatewayContext) -> bool:
    try:
        async with asyncio.timeout(_CHECK_TIMEOUT_S):
            return await context.backend.is_ready()
    except Exception:
        logger.warning("the workers' readiness check failed", exc_info=True)
        return False


async def _is_catalog_ready(context: GatewayContext) -> bool:
    try:
        async with asyncio.timeout(_CHECK_TIMEOUT_S):
            await asyncio.to_thread(context.catalog.list, 1)
    except Exception:
        logger.warning("the catalogue's readiness check failed", exc_info=True)
        return False
    return True
