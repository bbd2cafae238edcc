"""When a request is sent again, and how long to wait before."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from orthros_client.errors import (
    ConnectionFailedError,
    DeadlineExceededError,
    InvalidValueError,
    OrthrosError,
    ResponseTimeoutError,
    UnavailableError,
)

# A retryable 404 is that of a proxy whose service is not there: no work began.
RETRIED_STATUSES = frozenset({404, 429, 503, 504})
GATEWAY_STATUSES = frozenset({500, 502, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounds on sending again; both hold.

    Args:
        max_retries: Most times that one request is sent again, >= 0.
        max_retry_s: No retry begins later than this many seconds after the first attempt.
        base_delay_s: Wait before the first retry; it doubles with every further one.
        max_delay_s: Longest wait of our own choice; a Retry-After may ask for more.
    """

    max_retries: int = 3
    max_retry_s: float = 60.0
    base_delay_s: float = 0.5
    max_delay_s: float = 8.0

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise InvalidValueError(f"max_retries is {self.max_retries}; give 0 or more.")
        if not math.isfinite(self.max_retry_s) or self.max_retry_s < 0:
            raise InvalidValueError(
                f"max_retry_s is {self.max_retry_s}; give a finite number of seconds, 0 or more."
            )

    def backoff_s(self, retry: int, jitter: float) -> float:
        """Wait before retry number `retry` (from 0); `jitter` in [0, 1) spreads clients apart."""
        # The exponent is bounded because a float cannot hold 2 ** 1024.
        delay_s = min(self.max_delay_s, self.base_delay_s * 2.0 ** min(retry, 32))
        return delay_s * (0.5 + 0.5 * jitter)


class Attempts:
    """The attempts of one request.

    Args:
        policy: The bounds.
        is_idempotent: Whether sending twice does no harm even if the first one was received.
        max_total_s: A tighter bound than the policy's, such as the request's own deadline.
        monotonic: Clock in seconds.
        jitter: Draws from [0, 1).
    """

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        is_idempotent: bool,
        max_total_s: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._is_idempotent = is_idempotent
        self._monotonic = monotonic
        self._jitter = jitter
        self._num_retries = 0
        limit_s = (
            policy.max_retry_s if max_total_s is None else min(policy.max_retry_s, max_total_s)
        )
        self._ends_at = monotonic() + limit_s

    def next_delay_s(self, error: OrthrosError) -> float | None:
        """Seconds to wait before sending again, or None when `error` is final."""
        if self._num_retries >= self._policy.max_retries or not self._is_worth_a_retry(error):
            return None
        delay_s = self._policy.backoff_s(self._num_retries, self._jitter())
        if error.retry_after_s is not None:
            delay_s = max(delay_s, error.retry_after_s)
        if self._monotonic() + delay_s > self._ends_at:
            return None
        self._num_retries += 1
        return delay_s

    def _is_worth_a_retry(self, error: OrthrosError) -> bool:
        match error:
            case ConnectionFailedError():
                return self._is_idempotent or not error.was_sent
            case ResponseTimeoutError():
                return self._is_idempotent
        # A proxy's own 500, 502 or 504 leaves open whether the service got the request.
        is_proxy_error = isinstance(error, UnavailableError | DeadlineExceededError)
        if is_proxy_error and error.problem is None and error.status in GATEWAY_STATUSES:
            return self._is_idempotent
        return error.is_retryable and error.status in RETRIED_STATUSES
