"""What the endpoints work with; built once by `create_app`, handed to each request."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fastapi import Request

from orthros_service.admission import Admission
from orthros_service.documents import DocumentCatalog, TextStore
from orthros_service.errors import UnavailableError
from orthros_service.gateway.content_locks import ContentLocks
from orthros_service.gateway.waits import within_timeout
from orthros_service.settings import Settings
from orthros_service.telemetry import MetricsSink
from orthros_service.tokenization import Tokenizer
from orthros_service.types import GenerationBackend, ModelInfo

_MODEL_INFO_MAX_AGE_S = 10.0
# A restart takes about half a minute.
_STOPPING_RETRY_S = 30


class StoppingError(UnavailableError):
    """The service is stopping; what was asked is not begun."""


class ServedModel:
    """The served model, asked for now and then instead of with each request."""

    def __init__(self, backend: GenerationBackend) -> None:
        self._backend = backend
        self._info: ModelInfo | None = None
        self._asked = 0.0

    async def info(self) -> ModelInfo:
        """Return the served model; at most some seconds old.

        Raises:
            UnavailableError: No worker answers.
        """
        now = time.monotonic()
        if self._info is None or now - self._asked > _MODEL_INFO_MAX_AGE_S:
            call = self._backend.model_info()
            self._info = await within_timeout(call, what="describe the model")
            self._asked = now
        return self._info


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext:
    """Everything below the gateway that a request may need.

    Args:
        backend: The workers.
        catalog: Document rows; synchronous, called in threads.
        texts: Document texts; synchronous, called in threads.
        tokenizer: Counts tokens.
        settings: All settings.
        metrics: Where metric values go.
        metrics_text: Renders the metrics of this service in Prometheus' text format.
        admission: The gate in front of generations.
        model: The served model.
        header_tokens: Tokens of the fixed header in front of every document.
        content_locks: Held while a text and its rows are created or deleted together.
        draining: Set once the service is stopping: what runs may end, new work is refused.
    """

    backend: GenerationBackend
    catalog: DocumentCatalog
    texts: TextStore
    tokenizer: Tokenizer
    settings: Settings
    metrics: MetricsSink
    metrics_text: Callable[[], Awaitable[str]]
    admission: Admission
    model: ServedModel
    header_tokens: int
    content_locks: ContentLocks = field(default_factory=ContentLocks)
    draining: asyncio.Event = field(default_factory=asyncio.Event)


def get_context(request: Request) -> GatewayContext:
    """Return the app's context; a FastAPI dependency."""
    context = request.app.state.context
    assert isinstance(context, GatewayContext)
    return context


async def refuse_while_draining(request: Request) -> None:
    """Refuse new work while the service stops; a FastAPI dependency.

    Raises:
        StoppingError: The service is stopping.
    """
    if get_context(request).draining.is_set():
        raise StoppingError(
            "The service is stopping and takes no new work; send the request again later.",
            retry_after_s=_STOPPING_RETRY_S,
        )
