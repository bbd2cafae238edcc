"""The decode phase of one request: stream it, move it once if its worker dies, always free it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from orthros_service.engine.types import DecodeFinished, DecodeOutput, DecodeWork
from orthros_service.errors import EngineError, OrthrosError, UnavailableError
from orthros_service.pipeline.ports import DecodeWorker
from orthros_service.pipeline.run import Run

logger = logging.getLogger(__name__)

NUM_DECODE_RETRIES = 1
"""Times a sequence is sent to another worker when its own dies before anything was delivered."""

RELEASE_TIMEOUT_S = 5.0
"""Seconds that a worker may take to confirm a cancellation."""


async def decode(
    run: Run, prepare: Callable[[Run], Awaitable[DecodeWork]], worker: DecodeWorker
) -> AsyncGenerator[DecodeOutput, None]:
    """Stream the sequence; it may move to another worker while its caller has seen no text of it.

    After a move the text comes from its beginning again.

    Args:
        run: The request.
        prepare: Waits for its states; asked again where a state was lost on its way.
        worker: Decodes.
    """
    work = await prepare(run)
    num_retries, is_seen = 0, False
    while True:
        if run.is_revoked:
            raise run.revoked()
        run.phase = "decode"
        try:
            async with aclosing(_stream(run, work, worker)) as outputs:
                async for output in outputs:
                    is_seen = is_seen or _is_seen(run, output)
                    yield output
            return
        except UnavailableError as error:
            if is_seen or num_retries == NUM_DECODE_RETRIES:
                raise
            num_retries += 1
            logger.warning(
                "request %s is sent to another decode worker, retry %d of %d: %s",
                work.request_id,
                num_retries,
                NUM_DECODE_RETRIES,
                error,
            )
            if error.phase == "handoff":
                run.phase = "prefill"
                work = await prepare(run)


def _is_seen(run: Run, output: DecodeOutput) -> bool:
    if isinstance(output, DecodeFinished):
        return True
    return run.request.is_streamed and output.text != ""


async def _stream(
    run: Run, work: DecodeWork, worker: DecodeWorker
) -> AsyncGenerator[DecodeOutput, None]:
    outputs = worker.generate(replace(work, deadline_s=run.remaining_s))
    is_finished = False
    try:
        while not is_finished:
            try:
                async with run.limit():
                    output = await anext(outputs)
            except StopAsyncIteration:
                raise EngineError(
                    "The decode worker ended the answer without a result; send the request again.",
                    phase="decode",
                ) from None
            is_finished = isinstance(output, DecodeFinished)
            yield output
    finally:
        await _release(work.request_id, outputs, worker, is_finished=is_finished)


async def _release(
    request_id: str,
    outputs: AsyncIterator[DecodeOutput],
    worker: DecodeWorker,
    *,
    is_finished: bool,
) -> None:
    """Close the stream; where it is cut short, tell the worker too, which may be far away."""
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
            if not is_finished:
                await worker.cancel(request_id)
    except (OrthrosError, TimeoutError) as error:
        logger.warning("request %s may still be decoding: %r", request_id, error)
