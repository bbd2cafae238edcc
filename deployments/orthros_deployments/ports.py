"""The pipeline's two ports over Serve handles."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from orthros_deployments.descriptions import ServiceDescription
from orthros_deployments.leases import POLL_S, Confirmations
from orthros_deployments.remote_errors import orthros_errors
from orthros_service.engine.types import DecodeOutput, DecodeWork
from orthros_service.errors import StateError, UnavailableError
from orthros_service.ingest import not_ready_in_time
from orthros_service.state.types import StateHandle
from orthros_service.types import DocumentText, TokenizedDocument

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
"""Seconds for a call that only starts, stops or asks something; enough for a restart."""

_NUM_RETRIES = 1


class CoordinatorReplica:
    """The coordinator deployment; a `CoordinatorPort`."""

    def __init__(self, handle: DeploymentHandle[object]) -> None:
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
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        is_first = True
        while True:
            wait_s = min(max(0.0, deadline - loop.time()), POLL_S)
            handle = await _call(
                self._handle,
                "poll",
                source,
                wait_s,
                is_first,
                phase="prefill",
                timeout_s=wait_s + CALL_TIMEOUT_S,
            )
            if isinstance(handle, StateHandle):
                return handle
            is_first = False
            if loop.time() >= deadline:
                raise not_ready_in_time(timeout_s)

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
    """The decode deployment as one worker; a `DecodeWorker`.

    Args:
        handle: Handle of the decode deployment.
        forget: Drops a state of which segments are lost, so that it is made anew.
    """

    def __init__(
        self, handle: DeploymentHandle[object], *, forget: Callable[[str], Awaitable[None]]
    ) -> None:
        self._handle = handle
        self._forget = forget
        self._confirmations = Confirmations(handle)

    async def generate(self, work: DecodeWork) -> AsyncGenerator[DecodeOutput, None]:
        """Stream one sequence from one replica.

        Raises:
            UnavailableError: The replica that had it died, or a state is lost.
            OrthrosError: The sequence failed.
        """
        outputs = self._handle.options(stream=True).generate.remote(work)
        assert isinstance(outputs, DeploymentResponseGenerator)
        is_ended = False
        try:
            with self._confirmations.of(work.request_id), orthros_errors("decode"):
                async for output in outputs:
                    yield output
            is_ended = True
        except StateError as error:
            if error.phase != "handoff":
                raise
            for document in work.documents:
                await self._forget(document.content_key)
            raise UnavailableError(
                "A part of a document's state was lost; send the request again, and the document "
                "is prefilled again.",
                phase="handoff",
            ) from error
        finally:
            if not is_ended:
                outputs.cancel()  # type: ignore[no-untyped-call]

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
    handle: DeploymentHandle[object],
    method: str,
    *args: object,
    phase: str,
    timeout_s: float = CALL_TIMEOUT_S,
) -> Any:
    """Call a method of some replica, once more if the replica dies: every one bears repetition.

    Raises:
        UnavailableError: No answer within timeout_s, or the replica died again.
        OrthrosError: What the replica raised.
    """
    num_retries = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await _call_once(handle, method, *args, phase=phase)
                except UnavailableError as error:
                    if num_retries == _NUM_RETRIES:
                        raise
                    num_retries += 1
                    logger.warning("%s of %s is sent again: %s", method, handle, error.message)
    except TimeoutError:
        raise UnavailableError(
            f"The {phase} workers did not answer within {timeout_s:g} s; send the request again.",
            phase=phase,
        ) from None


async def _call_once(
    handle: DeploymentHandle[object], method: str, *args: object, phase: str
) -> Any:
    response = getattr(handle, method).remote(*args)
    assert isinstance(response, DeploymentResponse)
    try:
        with orthros_errors(phase):
            return await response
    except asyncio.CancelledError:
        response.cancel()  # type: ignore[no-untyped-call]
        raise
