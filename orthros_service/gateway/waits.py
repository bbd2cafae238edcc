"""No wait for the workers is without an end."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from orthros_service.errors import UnavailableError

CALL_TIMEOUT_S = 30.0
"""Longest wait for calls that only start or ask something."""

T = TypeVar("T")


async def within_timeout(call: Awaitable[T], *, what: str) -> T:
    """Await a short call to the backend.

    Args:
        call: The call.
        what: What it does, for the message.

    Raises:
        UnavailableError: It did not return in time.
    """
    timeout = asyncio.timeout(CALL_TIMEOUT_S)
    try:
        async with timeout:
            return await call
    except TimeoutError:
        if not timeout.expired():
            raise
        raise UnavailableError(
            f"The workers did not {what} within {CALL_TIMEOUT_S:g} s; send the request again."
        ) from None
