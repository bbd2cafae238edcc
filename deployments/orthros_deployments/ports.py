"""The pipeline's two ports over Serve handles."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle

from orthros_deployments.remote_errors import orthros_errors
from orthros_deployments.worker_description import ServiceDescription
from orthros_service.engine.types import DecodeOutput, DecodeWork
from orthros_service.state.types import StateHandle, TokenizedDocument
from orthros_service.types import DocumentText

T = TypeVar("T")

CALL_TIMEOUT_S = 30.0
"""Seconds for a call that only starts, stops or asks something; a dead replica restarts meanwhile."""

_ANSWER_MARGIN_S = 5.0


class CoordinatorReplica:
    """The coordinator deployment; a `CoordinatorPort`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def start(self, document: DocumentText) -> None:
        """Start ingesting a document, or join the running job; returns at once."""
        await _call(self._handle, "start", document, phase="prefill")

    async def wait_ready(
        self, source: DocumentText | TokenizedDocument, *, timeout_s: float
    ) -> StateHandle:
        """Ingest if need be and wait for the state; cancelling the wait leaves the job.

        Raises:
            DeadlineExceededError: Not ready within timeout_s.
            OrthrosError: The ingestion failed.
        """
        # The coordinator keeps the deadline; ours is for the case that it is not there.
        handle = await _call(
            self._handle,
            "wait_ready",
            source,
            timeout_s,
            phase="prefill",
            timeout_s=timeout_s + _ANSWER_MARGIN_S,
        )
        assert isinstance(handle, StateHandle)
        return handle

    async def forget(self, content_key: str) -> None:
        """Stop a running ingestion and delete the state from every tier."""
        await _call(self._handle, "forget", content_key, phase="prefill")

    async def is_ready(self) -> bool:
        """Whether work is accepted and a prefill replica answers."""
        return bool(await _call(self._handle, "is_ready", phase="prefill"))

    async def describe(self) -> ServiceDescription:
        """What this service is made of."""
        description = await _call(self._handle, "describe", phase="prefill")
        assert isinstance(description, ServiceDescription)
        return description


class DecodeReplicas:
    """The decode deployment as one worker; a `DecodeWorker`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def generate(self, work: DecodeWork) -> AsyncGenerator[DecodeOutput, None]:
        """Stream one sequence from one replica.

        Raises:
            UnavailableError: The replica that had it died.
            OrthrosError: The sequence failed.
        """
        outputs = self._handle.options(stream=True).generate.remote(work)
        is_ended = False
        try:
            with orthros_errors("decode"):
                async for output in outputs:
                    yield output
            is_ended = True
        finally:
            if not is_ended:
                outputs.cancel()

    async def cancel(self, request_id: str) -> None:
        """Free a sequence within one step, whichever replica has it."""
        with orthros_errors("decode"):
            await self._handle.broadcast("cancel", request_id).results_async(
                timeout_s=CALL_TIMEOUT_S
            )

    async def is_ready(self) -> bool:
        """Whether a replica answers."""
        return bool(await _call(self._handle, "is_ready", phase="decode"))


async def _call(
    handle: DeploymentHandle,
    method: str,
    *args: object,
    phase: str,
    timeout_s: float = CALL_TIMEOUT_S,
) -> Any:
    """Call a method of some replica; cancels the remote call when this one is cancelled.

    Raises:
        UnavailableError: No answer within timeout_s.
        OrthrosError: What the replica raised.
    """
    response = getattr(handle, method).remote(*args)
    try:
        with orthros_errors(phase):
            async with asyncio.timeout(timeout_s):
                return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
