"""OpenAI's chat completions: documents are `file` parts, everything else is an ordinary chat."""

import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from orthros_client.types import MAX_DOCUMENTS
from orthros_service.errors import OrthrosError
from orthros_service.gateway.bodies import JsonRoute
from orthros_service.gateway.context import GatewayContext, get_context
from orthros_service.gateway.disconnects import until_disconnect
from orthros_service.gateway.generation import Generation, GenerationJob
from orthros_service.gateway.models import require_served
from orthros_service.gateway.openai_types import (
    AssistantMessage,
    ChatCompletionRequest,
    Content,
    FilePart,
    TextPart,
    UserMessage,
)
from orthros_service.gateway.openapi import Responses, openai_errors
from orthros_service.gateway.problems import invalid_field, openai_json
from orthros_service.gateway.request_state import RequestState
from orthros_service.gateway.results import warnings_of
from orthros_service.gateway.sources import catalog_documents
from orthros_service.gateway.sse import EventStream, encode_event
from orthros_service.types import (
    GenerationFinished,
    Message,
    ModelInfo,
    Role,
    SamplingParameters,
    TokenDelta,
)

router = APIRouter(tags=["openai"], route_class=JsonRoute)
Context = Annotated[GatewayContext, Depends(get_context)]

_DONE = b"data: [DONE]\n\n"
_STREAM_EXAMPLE = (
    'data: {"id":"chatcmpl-...","object":"chat.completion.chunk","choices":[{"index":0,'
    '"delta":{"role":"assistant","content":""},"finish_reason":null}],...}\n\n'
    "data: [DONE]\n\n"
)
_RESPONSES: Responses = {
    200: {
        "description": (
            "A `chat.completion`; with `stream: true`, `chat.completion.chunk` events and "
            "`data: [DONE]`. A stream that fails ends with an `error` object and without `[DONE]`. "
            "`usage.prompt_tokens_details.cached_tokens` are the tokens of documents."
        ),
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}, "example": _STREAM_EXAMPLE},
        },
    },
    **openai_errors(400, 404, 409, 413, 415, 429, 503, 504),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Completion:
    """What all parts of one completion's answer share."""

    completion_id: str
    created: int
    model: ModelInfo
    generation: Generation
    wants_usage: bool

    def envelope(self, kind: str, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.digest[:16],
            "choices": choices,
            **more,
        }


@router.post(
    "/v1/chat/completions",
    name="chat_completions",
    summary="Chat, over documents or without",
    responses=_RESPONSES,
)
async def create_chat_completion(
    body: ChatCompletionRequest, context: Context, request: Request
) -> Response:
    """Answer a conversation. Upload documents to `/v1/documents` and name them as `file` parts."""
    model = await context.model.info()
    require_served(body.model, model)
    state = RequestState.of(request.scope)
    job = await _job(context, body)
    generation = Generation(context, state, job)
    completion = _Completion(
        completion_id=job.generation_id,
        created=int(time.time()),
        model=model,
        generation=generation,
        wants_usage=body.stream_options is not None and body.stream_options.include_usage,
    )
    if body.stream:
        # An error before the first token is answered with its own status.
        await until_disconnect(request, generation.start())
        return EventStream(
            _chunks(completion), encode_error=_encode_error, on_close=generation.close
        )
    finished = await until_disconnect(request, generation.finish())
    return JSONResponse(_whole(completion, finished))


async def _job(context: GatewayContext, body: ChatCompletionRequest) -> GenerationJob:
    document_ids = _document_ids(body)
    documents = await catalog_documents(context, document_ids) if document_ids else ()
    return GenerationJob(
        generation_id=f"chatcmpl-{secrets.token_hex(12)}",
        documents=documents,
        messages=_messages(body),
        sampling=SamplingParameters(
            max_tokens=body.token_limit,
            temperature=body.temperature if body.temperature is not None else 0.0,
            top_p=body.top_p if body.top_p is not None else 1.0,
            top_k=body.top_k,
            seed=body.seed,
            stop=body.stop_strings,
        ),
        wants_citations=False,
        deadline_s=context.settings.gateway.default_deadline_s,
    )


def _document_ids(body: ChatCompletionRequest) -> list[str]:
    document_ids: dict[str, None] = {}
    for index, message in enumerate(body.messages):
        parts = message.content if isinstance(message.content, list) else []
        for part in parts:
            if isinstance(part, FilePart):
                if not isinstance(message, UserMessage):
                    raise invalid_field(
                        f"messages.{index}.content", "documents belong into messages of the user"
                    )
                document_ids[part.file.file_id] = None
    if len(document_ids) > MAX_DOCUMENTS:
        raise invalid_field("messages", f"at most {MAX_DOCUMENTS} documents form one context")
    return list(document_ids)


def _messages(body: ChatCompletionRequest) -> tuple[Message, ...]:
    messages: list[Message] = []
    for index, message in enumerate(body.messages):
        role: Role = "system" if message.role == "developer" else message.role
        text = _text(message.content)
        if isinstance(message, AssistantMessage) and not text:
            text = message.refusal or ""
        if role == "system" and messages and messages[-1].role != "system":
            raise invalid_field(
                f"messages.{index}.role", "system and developer messages come before all others"
            )
        if role == "user" and messages and messages[-1].role == "user":
            # Some clients send the document and the question as two messages.
            joined = "\n\n".join(part for part in (messages.pop().content, text) if part)
            messages.append(Message(role="user", content=joined))
        elif text or role != "system":
            messages.append(Message(role=role, content=text))
    if not messages or messages[-1].role != "user":
        raise invalid_field("messages", "the last message must be the user's")
    if not messages[-1].content.strip():
        raise invalid_field("messages", "the last user message holds no text; ask something")
    return tuple(messages)


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def _whole(completion: _Completion, finished: GenerationFinished) -> dict[str, Any]:
    message = {"role": "assistant", "content": finished.text, "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": finished.finish_reason,
    }
    return completion.envelope(
        "chat.completion",
        [choice],
        usage=_usage(finished),
        orthros=_remarks(completion, finished),
    )


async def _chunks(completion: _Completion) -> AsyncGenerator[bytes, None]:
    yield _chunk(completion, {"role": "assistant", "content": ""})
    async for event in completion.generation.events():
        if isinstance(event, TokenDelta):
            if event.text:
                yield _chunk(completion, {"content": event.text})
        else:
            remarks = _remarks(completion, event)
            yield _chunk(completion, {}, finish_reason=event.finish_reason, orthros=remarks)
            if completion.wants_usage:
                last = completion.envelope("chat.completion.chunk", [], usage=_usage(event))
                yield encode_event(last)
            completion.generation.mark_delivered()
            yield _DONE


def _chunk(
    completion: _Completion,
    delta: dict[str, str],
    *,
    finish_reason: str | None = None,
    **more: object,
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    if completion.wants_usage:
        more["usage"] = None
    return encode_event(completion.envelope("chat.completion.chunk", [choice], **more))


def _usage(finished: GenerationFinished) -> dict[str, Any]:
    prompt_tokens = finished.document_tokens + finished.prompt_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.document_tokens},
    }


def _remarks(completion: _Completion, finished: GenerationFinished) -> dict[str, Any]:
    # A member that OpenAI does not have; its clients pass it on or ignore it.
    warnings = list(warnings_of(completion.generation, finished, completion.model))
    return {"converted": completion.model.is_converted, "warnings": warnings}


def _encode_error(error: OrthrosError) -> bytes:
    return encode_event(openai_json(error))
