"""Admission of generations: so many run, so many wait, the rest is told when to come back.

First form: it counts generations. One `Admission` belongs to one event loop.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from orthros_service.errors import DeadlineExceededError, OverloadedError
from orthros_service.telemetry.metrics import MetricsSink

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
# Weight of the newest duration in the running mean; about the last ten generations count.
_NEWEST_WEIGHT = 0.2
_FIRST_GUESS_S = 2.0


class Admission:
    """A fair gate: first come, first served; a waiter that is cancelled leaves the queue at once.

    Args:
        max_running: Generations that run at the same time.
        max_waiting: Generations that may wait for their turn; one more is refused.
        metrics: Where the depth of the queue and the refusals are recorded.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_waiting: int,
        metrics: MetricsSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._clock = clock
        self._num_running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._mean_duration_s = _FIRST_GUESS_S
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_running(self) -> int:
        """Generations inside the gate."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Generations before the gate."""
        return len(self._waiting)

    async def wait_idle(self) -> None:
        """Wait until no generation runs or waits."""
        await self._is_idle.wait()

    @asynccontextmanager
    async def slot(self, *, timeout_s: float) -> AsyncIterator[float]:
        """Hold one running slot; yields the seconds that were spent waiting for it.

        Args:
            timeout_s: Longest wait.

        Raises:
            OverloadedError: The queue is full; `retry_after_s` is its expected time to drain.
            DeadlineExceededError: No slot came free within timeout_s.
        """
        arrived = self._clock()
        await self._enter(timeout_s)
        admitted = self._clock()
        try:
            yield admitted - arrived
        finally:
            duration_s = self._clock() - admitted
            self._mean_duration_s += _NEWEST_WEIGHT * (duration_s - self._mean_duration_s)
            self._leave()

    def retry_after_s(self) -> float:
        """Expected seconds until a new arrival would find a place in the queue, in 1 to 60."""
        rounds = (len(self._waiting) + 1) / self._max_running
        expected_s = float(math.ceil(rounds * self._mean_duration_s))
        return min(max(expected_s, _MIN_RETRY_S), _MAX_RETRY_S)

    async def _enter(self, timeout_s: float) -> None:
        if self._num_running < self._max_running and not self._waiting:
            self._num_running += 1
            self._record()
            return
        if len(self._waiting) >= self._max_waiting:
            self._metrics.increment("orthros_admission_rejections_total", reason="queue_full")
            retry_after_s = self.retry_after_s()
            raise OverloadedError(
                f"{self._num_running} requests run and {len(self._waiting)} wait, the most that is "
                f"allowed; send the request again in {retry_after_s:.0f} s.",
                phase="queue",
                retry_after_s=retry_after_s,
            )
        await self._wait(timeout_s)

    async def _wait(self, timeout_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._record()
        try:
            # wait() rather than wait_for(): a turn that comes as the time runs out is not lost.
            await asyncio.wait([turn], timeout=timeout_s)
        except asyncio.CancelledError:
            if turn.done():
                self._leave()
            else:
                self._give_up(turn)
            raise
        if turn.done():
            return
        self._give_up(turn)
        self._metrics.increment("orthros_admission_rejections_total", reason="queue_timeout")
        raise DeadlineExceededError(
            f"The request waited {timeout_s:.1f} s and its turn did not come; send it again later, "
            "or with a longer deadline.",
            phase="queue",
            retry_after_s=self.retry_after_s(),
        )

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        self._waiting.remove(turn)
        self._record()

    def _leave(self) -> None:
        if self._waiting:
            # The slot passes to the next in line: the number of running generations stays.
            self._waiting.popleft().set_result(None)
        else:
            self._num_running -= 1
        self._record()

    def _record(self) -> None:
        if self._num_running or self._waiting:
            self._is_idle.clear()
        else:
            self._is_idle.set()
        self._metrics.set("orthros_requests_in_flight", self._num_running)
        self._metrics.set("orthros_queue_depth", len(self._waiting))
