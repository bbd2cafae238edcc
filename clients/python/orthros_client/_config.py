"""How a client reaches its service: address, timeouts, bounds on retries."""

import ipaddress
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import httpx

from orthros_client._retries import Attempts, RetryPolicy
from orthros_client._watch import DocumentWatch
from orthros_client._wire_request import ResponseT, WireRequest
from orthros_client.errors import InvalidValueError

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
DEFAULT_CONNECT_TIMEOUT_S = 5.0
# An answer that is not streamed arrives as a whole: wait longer than the service's own deadline.
DEFAULT_READ_TIMEOUT_S = 660.0
DEFAULT_WAIT_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """How a client reaches its service.

    Args:
        base_url: Address of the service, with a path where it sits behind one.
        connect_timeout_s: Seconds to establish a connection.
        read_timeout_s: Seconds that the service may keep silent.
        retries: Bounds on sending again.
        headers: Further headers of every request, for example for a proxy.
        monotonic: Clock in seconds.
        jitter: Draws from [0, 1).
    """

    base_url: str
    connect_timeout_s: float
    read_timeout_s: float
    retries: RetryPolicy
    headers: Mapping[str, str] = field(default_factory=dict)
    monotonic: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "read_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidValueError(f"{name} is {value}; give a number of seconds above 0.")
        try:
            url = httpx.URL(self.base_url)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InvalidValueError(f"base_url is not a URL: {error}") from error
        if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
            raise InvalidValueError(
                f"base_url is {self.base_url!r}; give an address such as http://127.0.0.1:8000."
            )

    @property
    def shown_url(self) -> str:
        """The address without credentials, for messages."""
        url = httpx.URL(self.base_url)
        return f"{url.scheme}://{url.netloc.decode('ascii')}"

    @property
    def is_loopback(self) -> bool:
        """Whether the service is on this machine, where a proxy cannot reach it."""
        host = httpx.URL(self.base_url).host
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost" or host.endswith(".localhost")

    def all_headers(self) -> dict[str, str]:
        """Headers of every request."""
        try:
            agent = f"orthros-client/{version('orthros-client')}"
        except PackageNotFoundError:
            agent = "orthros-client"
        return {"User-Agent": agent, "Accept": "application/json", **self.headers}

    def attempts(self, request: WireRequest[ResponseT]) -> Attempts:
        """Count the attempts of one request."""
        return Attempts(
            self.retries,
            is_idempotent=request.is_idempotent,
            max_total_s=request.max_total_s,
            monotonic=self.monotonic,
            jitter=self.jitter,
        )

    def watch(self, document_id: str, timeout_s: float | None) -> DocumentWatch:
        """Begin a wait for a document."""
        return DocumentWatch(
            document_id,
            timeout_s=timeout_s,
            policy=self.retries,
            monotonic=self.monotonic,
            jitter=self.jitter,
        )

    def timeout(self, read_timeout_s: float) -> httpx.Timeout:
        """Timeouts of one request; sending and waiting for a free connection count as reading."""
        return httpx.Timeout(read_timeout_s, connect=self.connect_timeout_s)
