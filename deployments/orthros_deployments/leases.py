"""Work belongs to a caller that is alive: a process that is killed can cancel nothing any more.

Ray tells a replica of a cancelled call, but not of a caller that died. So callers of streams
confirm their requests now and then, waits for a state are polls that must be repeated, and what is
neither confirmed nor repeated is freed.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ray.serve.handle import DeploymentHandle

from orthros_deployments.remote_errors import orthros_errors
from orthros_service.errors import OrthrosError

logger = logging.getLogger(__name__)

CONFIRM_EVERY_S = 4.0
"""Seconds between two confirmations of a running request."""

LEASE_S = 20.0
"""Seconds after its last confirmation that a request is given up."""

POLL_S = 10.0
"""Longest wait of one poll for a state."""

POLL_GRACE_S = 10.0
"""Seconds until the next poll after which its caller counts as gone."""


class Confirmations:
    """Confirms this process's requests to every replica of a deployment, while there are any.

    Args:
        handle: Handle of a deployment that has a method `confirm`.
    """

    def __init__(self, handle: DeploymentHandle[object]) -> None:
        self._handle = handle
        self._request_ids: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def of(self, request_id: str) -> Iterator[None]:
        """Confirm a request as long as the block runs."""
        self._request_ids.add(request_id)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._request_ids.discard(request_id)

    async def _run(self) -> None:
        while self._request_ids:
            await asyncio.sleep(CONFIRM_EVERY_S)
            if self._request_ids:
                await self._confirm(tuple(self._request_ids))

    async def _confirm(self, request_ids: tuple[str, ...]) -> None:
        try:
            with orthros_errors("decode"):
                await self._handle.broadcast("confirm", request_ids).results_async(
                    timeout_s=CONFIRM_EVERY_S
                )
        except OrthrosError as error:
            logger.warning("running requests were not confirmed: %s", error.message)
