"""The generation backend: waits for states, decodes the tail, finds the evidence. Torch-free."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from orthros_service.engine.types import DecodeFinished, DecodeWork
from orthros_service.errors import (
    InvalidValueError,
    OrthrosError,
)
from orthros_service.pipeline.decoding import decode
from orthros_service.pipeline.ports import CoordinatorPort, DecodeWorker, EvidenceSelector
from orthros_service.pipeline.prompt import PromptPlan, PromptPlanner
from orthros_service.pipeline.run import Run
from orthros_service.state.types import StateHandle
from orthros_service.types import (
    DocumentText,
    EvidenceSpan,
    GenerationEvent,
    GenerationFinished,
    GenerationRequest,
    ModelInfo,
    Timings,
    TokenDelta,
)

logger = logging.getLogger(__name__)


class Pipeline:
    """Runs requests over a coordinator and decode workers; a `GenerationBackend`.

    Args:
        coordinator: Ingests documents and hands out their states.
        decoder: Decodes sequences.
        planner: Splits prompts into states and tails, and checks their lengths.
        select_evidence: Turns attention mass into passages.
        model: What is served.
        stop_ids: Token ids that end an answer.
    """

    def __init__(
        self,
        *,
        coordinator: CoordinatorPort,
        decoder: DecodeWorker,
        planner: PromptPlanner,
        select_evidence: EvidenceSelector,
        model: ModelInfo,
        stop_ids: frozenset[int],
    ) -> None:
        self._coordinator = coordinator
        self._decoder = decoder
        self._planner = planner
        self._select_evidence = select_evidence
        self._model = model
        self._stop_ids = stop_ids
        self._runs: dict[str, Run] = {}

    async def ingest(self, document: DocumentText) -> None:
        """Start (or join) the ingestion of a document and return at once."""
        await self._coordinator.start(document)

    async def forget(self, content_key: str) -> None:
        """Drop the state of this content from every tier."""
        await self._coordinator.forget(content_key)

    async def model_info(self) -> ModelInfo:
        """The served model."""
        return self._model

    async def is_ready(self) -> bool:
        """Whether at least one prefill and one decode worker answer."""
        try:
            return all(await asyncio.gather(self._coordinator.is_ready(), self._decoder.is_ready()))
        except OrthrosError as error:
            logger.info("not ready: %s", error.message)
            return False

    async def cancel(self, request_id: str) -> None:
        """Stop a request, which ends with a `CancelledError`; unknown ids are ignored."""
        run = self._runs.get(request_id)
        if run is not None:
            run.is_revoked = True
            if run.preparing is not None and run.preparing.cancel():
                return
        # Also for ids that are unknown here: another gateway may have started the sequence.
        await self._decoder.cancel(request_id)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Answer a request; closing the generator cancels the work within one step.

        Raises:
            ContextTooLongError: Documents, tail and one token of answer do not fit.
            DeadlineExceededError: `request.deadline_s` has passed; `phase` says where.
            CancelledError: `cancel` was called.
            OrthrosError: Ingestion or decoding failed.
        """
        if request.request_id in self._runs:
            raise InvalidValueError(f"Request {request.request_id!r} is already running.")
        run = Run(request=request, deadline=asyncio.get_running_loop().time() + request.deadline_s)
        self._runs[request.request_id] = run
        outcome, finished = "internal", None
        try:
            async with aclosing(decode(run, self._prepared, self._decoder)) as outputs:
                async for output in outputs:
                    if isinstance(output, DecodeFinished):
                        finished = await self._finish(run, output)
                        outcome = finished.finish_reason
                        yield finished
                    else:
                        yield TokenDelta(text=output.text, num_tokens=output.num_tokens)
        except OrthrosError as error:
            outcome = error.code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = finished.finish_reason if finished else "cancelled"
            raise
        finally:
            del self._runs[request.request_id]
            run.log(outcome, finished)

    async def _prepared(self, run: Run) -> DecodeWork:
        """Run `_prepare` as a task, so that the deadline and `cancel` end it."""
        preparing = run.preparing = asyncio.create_task(self._prepare(run))
        try:
            async with run.limit():
                return await preparing
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if run.is_revoked and not (task and task.cancelling()):
                raise run.revoked() from None
            raise

    async def _prepare(self, run: Run) -> DecodeWork:
        request = run.request
        plan = await asyncio.to_thread(self._planner.plan, request)
        started_at = time.perf_counter()
        handles = await self._wait_ready(run, plan)
        if handles:
            run.prefill_s = time.perf_counter() - started_at
        state_tokens = sum(handle.num_tokens for handle in handles)
        wanted = request.sampling.max_tokens
        max_tokens = self._planner.fitting_max_tokens(
            plan, document_tokens=state_tokens, wanted=wanted
        )
        if max_tokens < wanted:
            logger.info(
                "max_tokens %d does not fit behind the prompt, set to %d", wanted, max_tokens
            )
        run.max_tokens = max_tokens
        run.is_linear = any(handle.layout.mode == "linear" for handle in handles)
        run.document_tokens = state_tokens - plan.num_prefix_tokens
        run.prompt_tokens = plan.num_prefix_tokens + len(plan.tail_ids)
        return DecodeWork(
            request_id=request.request_id,
            documents=handles,
            tail_ids=plan.tail_ids,
            sampling=replace(request.sampling, max_tokens=max_tokens),
            stop_ids=self._stop_ids,
            wants_evidence=request.wants_citations and bool(request.documents),
            deadline_s=request.deadline_s,
        )

    async def _wait_ready(self, run: Run, plan: PromptPlan) -> tuple[StateHandle, ...]:
        """Wait for every source; the first that fails ends the wait for the others."""
        waiting = [
            asyncio.create_task(self._coordinator.wait_ready(source, timeout_s=run.remaining_s))
            for source in plan.sources
        ]
        if not waiting:
            return ()
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            return tuple(task.result() for task in waiting)
        finally:
            for task in waiting:
                task.cancel()
            # So that no error of theirs is lost without having been looked at.
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _finish(self, run: Run, output: DecodeFinished) -> GenerationFinished:
        evidence: tuple[EvidenceSpan, ...] = ()
        if output.evidence:
            texts = [document.text for document in run.request.documents]
            async with run.limit():
                evidence = await asyncio.to_thread(
                    self._select_evidence, texts, output.evidence, output.text
                )
        return GenerationFinished(
            text=output.text,
            finish_reason=output.finish_reason,
            document_tokens=run.document_tokens,
            prompt_tokens=run.prompt_tokens,
            completion_tokens=output.completion_tokens,
            max_tokens=run.max_tokens,
            is_linear=run.is_linear,
            evidence=evidence,
            timings=Timings(
                queue_s=output.queue_s,
                prefill_s=run.prefill_s,
                handoff_s=output.handoff_s,
                first_token_s=output.first_token_s,
                decode_s=output.decode_s,
            ),
        )
