"""The prefill deployment as one worker, seen from the coordinator."""

import asyncio
from collections.abc import Sequence

from ray.serve.handle import DeploymentHandle, DeploymentResponse

from orthros_deployments.descriptions import WorkerDescription
from orthros_deployments.remote_errors import orthros_errors
from orthros_service.engine.types import PrefillStep
from orthros_service.state.types import SegmentRef


class PrefillReplicas:
    """A `PrefillWorker`; Serve chooses the replica of each step.

    Args:
        handle: Handle of the prefill deployment.
    """

    def __init__(self, handle: DeploymentHandle[object]) -> None:
        self._handle = handle

    async def step(self, step: PrefillStep, context: Sequence[SegmentRef]) -> SegmentRef:
        """Compute one segment; its reference is owned by this process, not by the replica.

        Raises:
            OrthrosError: The step failed; retryable when the replica died.
        """
        response = self._handle.step.remote(step, list(context))
        assert isinstance(response, DeploymentResponse)
        try:
            with orthros_errors("prefill"):
                # Awaiting the response itself would give the value without its reference.
                ref = await response._to_object_ref()
                await ref
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        return ref

    async def is_ready(self) -> bool:
        """Whether a replica answers."""
        with orthros_errors("prefill"):
            return bool(await self._handle.is_ready.remote())

    async def describe(self) -> WorkerDescription:
        """What the replicas have loaded; waits for the first of them."""
        with orthros_errors("prefill"):
            described = await self._handle.describe.remote()
        assert isinstance(described, WorkerDescription)
        return described
