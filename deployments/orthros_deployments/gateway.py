"""The gateway replica: the HTTP application over the deployments. Never loads torch."""

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from orthros_deployments.backend import ServedBackend
from orthros_deployments.cluster_metrics import ClusterMetrics
from orthros_deployments.metrics import RayMetrics
from orthros_service.documents import DocumentCatalog, TextStore
from orthros_service.gateway.app import create_app
from orthros_service.settings import Settings
from orthros_service.telemetry import configure_logging
from orthros_service.tokenization import Tokenizer


@serve.ingress()
class Gateway:
    """Holds what the application works with.

    Args:
        settings: All settings.
        coordinator: Handle of the coordinator deployment.
        decode: Handle of the decode deployment.
    """

    async def __init__(
        self, settings: Settings, coordinator: DeploymentHandle, decode: DeploymentHandle
    ) -> None:
        configure_logging(settings.log)
        tokenizer = Tokenizer.from_directory(settings.model.directory)
        self._app = create_app(
            backend=ServedBackend(coordinator=coordinator, decode=decode, tokenizer=tokenizer),
            catalog=DocumentCatalog(settings.documents.database_url),
            texts=TextStore(settings.documents.text_uri),
            tokenizer=tokenizer,
            settings=settings,
            metrics=RayMetrics(),
            metrics_text=ClusterMetrics().render,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once this is built."""
        return self._app
