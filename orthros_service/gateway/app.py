"""The HTTP face: one FastAPI application over a generation backend."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version

from fastapi import Depends, FastAPI

from orthros_client.types import DocumentCreate
from orthros_service.admission import Admission
from orthros_service.documents import DocumentCatalog, TextStore
from orthros_service.gateway import answers, document_events, documents, health, models, openai
from orthros_service.gateway.context import (
    GatewayContext,
    ServedModel,
    refuse_while_draining,
)
from orthros_service.gateway.openapi import DESCRIPTION, install_openapi, operation_id
from orthros_service.gateway.problems import install_error_handlers
from orthros_service.gateway.request_scope import RequestScope
from orthros_service.settings import Settings
from orthros_service.telemetry import MetricsSink
from orthros_service.tokenization import PromptFormat, Tokenizer
from orthros_service.types import GenerationBackend


def create_app(
    *,
    backend: GenerationBackend,
    catalog: DocumentCatalog,
    texts: TextStore,
    tokenizer: Tokenizer,
    settings: Settings,
    metrics: MetricsSink,
    metrics_text: Callable[[], Awaitable[str]],
) -> FastAPI:
    """Build the application. Nothing is opened or closed here: the caller owns what it passes.

    Args:
        backend: The workers.
        catalog: Document rows.
        texts: Document texts.
        tokenizer: The served model's.
        settings: All settings.
        metrics: Where metric values go.
        metrics_text: Renders the service's metrics in Prometheus' text format for `/metrics`.
    """
    app = build_routes()
    app.state.context = GatewayContext(
        backend=backend,
        catalog=catalog,
        texts=texts,
        tokenizer=tokenizer,
        settings=settings,
        metrics=metrics,
        metrics_text=metrics_text,
        admission=Admission(
            max_running=settings.gateway.max_concurrent_requests,
            max_waiting=settings.gateway.max_waiting_requests,
            metrics=metrics,
        ),
        model=ServedModel(backend),
        header_tokens=len(PromptFormat(tokenizer).header_ids),
    )
    app.add_middleware(RequestScope, metrics=metrics)
    return app


async def drain(app: FastAPI, *, timeout_s: float) -> bool:
    """Refuse new work and wait until what runs has ended.

    Returns:
        Whether it has; False after timeout_s.
    """
    context: GatewayContext = app.state.context
    context.draining.set()
    try:
        async with asyncio.timeout(timeout_s):
            await context.admission.wait_idle()
    except TimeoutError:
        return False
    return True


def build_routes() -> FastAPI:
    """Return the application without anything behind it: enough for its OpenAPI document."""
    app = FastAPI(
        title="Orthros",
        version=version("orthros-service"),
        description=DESCRIPTION,
        # FastAPI's page would load its scripts from a CDN.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
    )
    for room in (documents, document_events, answers, openai, models):
        app.include_router(room.router, dependencies=[Depends(refuse_while_draining)])
    app.include_router(health.router)
    install_error_handlers(app)
    install_openapi(app, DocumentCreate)
    return app
