"""The workers of a running service as a `GenerationBackend`, from any process of its cluster."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from orthros_deployments.descriptions import ServiceDescription
from orthros_deployments.ports import CoordinatorReplica, DecodeReplicas
from orthros_service.citations import select_evidence
from orthros_service.errors import UnavailableError
from orthros_service.pipeline import Pipeline, PromptLimits, PromptPlanner
from orthros_service.tokenization import PromptFormat, Tokenizer
from orthros_service.types import (
    DocumentText,
    GenerationEvent,
    GenerationRequest,
    ModelInfo,
)

APP_NAME = "orthros"


class ServedBackend:
    """A pipeline over the deployments; built at its first use, since the workers say what it needs.

    Belongs to one event loop.

    Args:
        coordinator: Handle of the coordinator deployment.
        decode: Handle of the decode deployment.
        tokenizer: The served model's, if this process has loaded it already.
    """

    def __init__(
        self,
        *,
        coordinator: DeploymentHandle[object],
        decode: DeploymentHandle[object],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._coordinator = CoordinatorReplica(coordinator)
        self._decoder = DecodeReplicas(decode, forget=self._coordinator.forget)
        self._tokenizer = tokenizer
        self._pipeline: Pipeline | None = None
        self._building = asyncio.Lock()

    async def ingest(self, document: DocumentText) -> None:
        """Start (or join) the ingestion of a document and return at once."""
        await self._coordinator.start(document)

    async def forget(self, content_key: str) -> None:
        """Drop the state of this content from every tier."""
        await self._coordinator.forget(content_key)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Answer; closing the iterator cancels the work within one step.

        Raises:
            OrthrosError: See `Pipeline.generate`.
        """
        pipeline = await self._built()
        async with aclosing(pipeline.generate(request)) as events:
            async for event in events:
                yield event

    async def cancel(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored."""
        await (await self._built()).cancel(request_id)

    async def model_info(self) -> ModelInfo:
        """The served model."""
        return await (await self._built()).model_info()

    async def is_ready(self) -> bool:
        """Whether at least one prefill and one decode replica answer."""
        return await (await self._built()).is_ready()

    async def _built(self) -> Pipeline:
        async with self._building:
            if self._pipeline is None:
                service = await self._coordinator.describe()
                self._pipeline = await asyncio.to_thread(self._build, service)
        return self._pipeline

    def _build(self, service: ServiceDescription) -> Pipeline:
        settings, model = service.settings, service.worker.model
        tokenizer = self._tokenizer or Tokenizer.from_directory(settings.model.directory)
        limits = PromptLimits(
            full_prefill_max_tokens=model.full_prefill_max_tokens,
            max_context_tokens=model.max_context_tokens,
            max_tail_tokens=settings.decode.max_tail_tokens,
            tile=service.worker.tile,
        )
        return Pipeline(
            coordinator=self._coordinator,
            decoder=self._decoder,
            planner=PromptPlanner(PromptFormat(tokenizer), limits),
            select_evidence=select_evidence,
            model=model,
            stop_ids=tokenizer.stop_ids,
        )


def connect_backend(app_name: str = APP_NAME) -> ServedBackend:
    """The backend of a service that runs on the Ray cluster this process is connected to.

    Args:
        app_name: The service's Serve application.

    Raises:
        UnavailableError: This process is not connected to a cluster, or no service runs on it.
    """
    if not ray.is_initialized():
        raise UnavailableError(
            "This process is not connected to a Ray cluster; call `ray.init(address=...)` with the "
            "address that `orthros serve` prints."
        )
    try:
        return ServedBackend(
            coordinator=serve.get_deployment_handle("Coordinator", app_name),
            decode=serve.get_deployment_handle("Decode", app_name),
        )
    except (RayServeException, KeyError) as error:
        raise UnavailableError(
            f"No service named {app_name!r} runs on this Ray cluster; start one with "
            "`orthros serve`."
        ) from error
