"""Questions and summaries over documents, as one JSON body or as a stream of events."""

import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Request, Response
from fastapi.responses import JSONResponse

from orthros_client.types import Answer, AnswerRequest, SummaryRequest
from orthros_service.errors import OrthrosError
from orthros_service.gateway.bodies import JsonRoute
from orthros_service.gateway.context import GatewayContext, get_context
from orthros_service.gateway.disconnects import until_disconnect
from orthros_service.gateway.generation import Generation, GenerationJob
from orthros_service.gateway.openapi import Responses, problems
from orthros_service.gateway.problems import problem_json
from orthros_service.gateway.prompts import conversation, summary_instruction
from orthros_service.gateway.request_state import RequestState
from orthros_service.gateway.results import build_answer
from orthros_service.gateway.sources import catalog_documents, inline_document
from orthros_service.gateway.sse import EventStream, encode_event
from orthros_service.types import (
    GenerationFinished,
    Message,
    ModelInfo,
    SamplingParameters,
)

router = APIRouter(tags=["answers"], route_class=JsonRoute)
Context = Annotated[GatewayContext, Depends(get_context)]
Kind = Literal["answer", "summary"]

AnswerBody = Annotated[
    AnswerRequest,
    Body(
        openapi_examples={
            "documents": {
                "summary": "Ask an ingested document, with a stream",
                "value": {
                    "document_ids": ["doc_0123456789abcdef01234567"],
                    "question": "Who owns Pemberley?",
                    "stream": True,
                },
            },
            "text": {
                "summary": "Ask a text that is sent along",
                "value": {"text": "Mr. Darcy owns Pemberley.", "question": "Who owns it?"},
            },
            "follow-up": {
                "summary": "Ask again, with the earlier turns",
                "value": {
                    "document_ids": ["doc_0123456789abcdef01234567"],
                    "history": [
                        {"role": "user", "content": "Who owns Pemberley?"},
                        {"role": "assistant", "content": "Mr. Darcy."},
                    ],
                    "question": "And where is it?",
                    "max_tokens": 64,
                },
            },
        }
    ),
]
SummaryBody = Annotated[
    SummaryRequest,
    Body(
        openapi_examples={
            "bullets": {
                "summary": "The main points about one matter",
                "value": {
                    "document_ids": ["doc_0123456789abcdef01234567"],
                    "style": "bullets",
                    "focus": "the houses and who lives in them",
                },
            }
        }
    ),
]

_STREAM_EXAMPLE = (
    'event: delta\ndata: {"text":"Mr. "}\n\n'
    'event: delta\ndata: {"text":"Darcy."}\n\n'
    'event: completed\ndata: {"id":"ans_...","object":"answer","text":"Mr. Darcy.",...}\n\n'
)
_RESPONSES: Responses = {
    200: {
        "description": (
            "The answer; with `stream: true`, `delta` events with more text and one `completed` "
            "event with the whole answer. A stream that fails ends with an `error` event that "
            "holds a problem document: without `completed` there is no answer."
        ),
        "content": {
            "text/event-stream": {"schema": {"type": "string"}, "example": _STREAM_EXAMPLE}
        },
    },
    **problems(400, 404, 409, 413, 415, 422, 429, 503, 504),
}


@router.post(
    "/v1/answers",
    name="answers",
    summary="Ask one or several documents",
    response_model=Answer,
    responses=_RESPONSES,
)
async def create_answer(body: AnswerBody, context: Context, request: Request) -> Response:
    """Answer a question over ingested documents, or over a text that is sent along."""
    messages = conversation(body.question, instructions=body.instructions, history=body.history)
    return await _respond(context, request, body, messages, kind="answer")


@router.post(
    "/v1/summaries",
    name="summaries",
    summary="Summarize one or several documents",
    response_model=Answer,
    responses=_RESPONSES,
)
async def create_summary(body: SummaryBody, context: Context, request: Request) -> Response:
    """Summarize ingested documents, or a text that is sent along, in the wanted style."""
    question = summary_instruction(body.style, body.focus)
    messages = conversation(question, instructions=body.instructions)
    return await _respond(context, request, body, messages, kind="summary")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """What is needed to write the answer once the generation has finished.

    The model is asked for before the generation, so that a finished answer cannot be lost to it.
    """

    context: GatewayContext
    state: RequestState
    generation: Generation
    model: ModelInfo
    kind: Kind

    def answer(self, finished: GenerationFinished) -> dict[str, Any]:
        answer = build_answer(
            self.generation,
            finished,
            kind=self.kind,
            model=self.model,
            total_s=self.state.age_s,
            metrics=self.context.metrics,
        )
        return answer.model_dump()

    async def events(self) -> AsyncGenerator[bytes, None]:
        async for event in self.generation.events():
            if isinstance(event, GenerationFinished):
                completed = encode_event(self.answer(event), name="completed")
                self.generation.mark_delivered()
                yield completed
            elif event.text:
                yield encode_event({"text": event.text}, name="delta")


async def _respond(
    context: GatewayContext,
    request: Request,
    body: AnswerRequest | SummaryRequest,
    messages: tuple[Message, ...],
    *,
    kind: Kind,
) -> Response:
    state = RequestState.of(request.scope)
    model = await context.model.info()
    generation = Generation(context, state, await _job(context, body, messages, kind=kind))
    reply = _Reply(context=context, state=state, generation=generation, model=model, kind=kind)
    if body.stream:
        # An error before the first token is answered with its own status.
        await until_disconnect(request, generation.start())
        return EventStream(reply.events(), encode_error=_encode_error, on_close=generation.close)
    return JSONResponse(reply.answer(await until_disconnect(request, generation.finish())))


async def _job(
    context: GatewayContext,
    body: AnswerRequest | SummaryRequest,
    messages: tuple[Message, ...],
    *,
    kind: Kind,
) -> GenerationJob:
    if body.document_ids is not None:
        documents = await catalog_documents(context, body.document_ids)
    else:
        assert body.text is not None, "the wire type takes exactly one of the two"
        documents = (inline_document(context, body.text, body.prefill_mode),)
    return GenerationJob(
        generation_id=f"{'ans' if kind == 'answer' else 'sum'}_{secrets.token_hex(12)}",
        documents=documents,
        messages=messages,
        sampling=SamplingParameters(
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            stop=tuple(body.stop),
        ),
        wants_citations=body.citations,
        deadline_s=body.deadline_s or context.settings.gateway.default_deadline_s,
    )


def _encode_error(error: OrthrosError) -> bytes:
    return encode_event(problem_json(error), name="error")
