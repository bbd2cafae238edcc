"""The gateway replica: the HTTP application over the deployments. Never loads torch."""

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from orthros_deployments.backend import ServedBackend
from orthros_deployments.cluster_metrics import ClusterMetrics
from orthros_deployments.metrics import MetricsPage, ReplicaMetrics
from orthros_deployments.replica_logging import configure_replica_logging
from orthros_service.documents import DocumentCatalog, TextStore
from orthros_service.gateway.app import create_app, drain
from orthros_service.settings import Settings
from orthros_service.tokenization import Tokenizer


@serve.ingress()
class Gateway:
    """Holds what the application works with.

    Args:
        settings: All settings.
        coordinator: Handle of the coordinator deployment.
        prefill: Handle of the prefill deployment, for its metrics.
        decode: Handle of the decode deployment.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        coordinator: DeploymentHandle[object],
        prefill: DeploymentHandle[object],
        decode: DeploymentHandle[object],
    ) -> None:
        configure_replica_logging(settings.log)
        context = serve.get_replica_context()
        itself = serve.get_deployment_handle(context.deployment, context.app_name)
        tokenizer = Tokenizer.from_directory(settings.model.directory)
        self._metrics = ReplicaMetrics()
        self._app = create_app(
            backend=ServedBackend(coordinator=coordinator, decode=decode, tokenizer=tokenizer),
            catalog=DocumentCatalog(settings.documents.database_url),
            texts=TextStore(settings.documents.text_uri),
            tokenizer=tokenizer,
            settings=settings,
            metrics=self._metrics,
            metrics_text=ClusterMetrics([itself, coordinator, prefill, decode]).render,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once this is built."""
        return self._app

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work; returns whether what was running has ended within timeout_s."""
        return await drain(self._app, timeout_s=timeout_s)

    async def metrics_page(self) -> MetricsPage:
        """This replica's metrics."""
        return self._metrics.page()
