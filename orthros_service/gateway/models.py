"""The served model, and how long a text is in its tokens."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends

from orthros_client.types import ModelCard, ModelList, TokenCount, TokenCountRequest
from orthros_service.documents import normalize_text
from orthros_service.gateway.bodies import JsonRoute
from orthros_service.gateway.context import GatewayContext, get_context
from orthros_service.gateway.openapi import openai_errors, problems
from orthros_service.gateway.problems import ModelNotFoundError
from orthros_service.types import ModelInfo

router = APIRouter(tags=["models"], route_class=JsonRoute)
Context = Annotated[GatewayContext, Depends(get_context)]


@router.get(
    "/v1/models",
    name="models",
    summary="List the served models",
    response_model=ModelList,
    responses=openai_errors(503),
)
async def list_models(context: Context) -> ModelList:
    """One model is served. `converted` says whether its weights were trained for linear prefill."""
    return ModelList(data=[model_card(await context.model.info())])


@router.get(
    "/v1/models/{model_id:path}",
    name="model",
    summary="Describe one served model",
    response_model=ModelCard,
    responses=openai_errors(404, 503),
)
async def get_model(model_id: str, context: Context) -> ModelCard:
    """The same card as in the list; 404 for a model that is not served."""
    info = await context.model.info()
    require_served(model_id, info)
    return model_card(info)


@router.post(
    "/v1/tokens:count",
    name="tokens_count",
    summary="Count a text's tokens",
    response_model=TokenCount,
    responses=problems(400, 413, 415, 422, 503),
)
async def count_tokens(body: TokenCountRequest, context: Context) -> TokenCount:
    """Count without ingesting. `document_tokens` is what a document with this text will report."""
    text = normalize_text(body.text, max_bytes=context.settings.documents.max_bytes)
    num_tokens = await asyncio.to_thread(context.tokenizer.count_tokens, text)
    document_tokens = num_tokens + context.header_tokens
    info = await context.model.info()
    is_full = document_tokens <= info.full_prefill_max_tokens
    return TokenCount(
        num_tokens=num_tokens,
        document_tokens=document_tokens,
        num_chars=len(text),
        prefill_mode="full" if is_full else "linear",
    )


def require_served(model_id: str, info: ModelInfo) -> None:
    """Refuse a model that is not the served one.

    Raises:
        ModelNotFoundError: The message names the served model.
    """
    if model_id != info.name:
        raise ModelNotFoundError(f"There is no such model here; the served model is {info.name}.")


def model_card(info: ModelInfo) -> ModelCard:
    """Return what the API says about a model."""
    return ModelCard(
        id=info.name,
        converted=info.is_converted,
        trained_context_tokens=info.trained_context_tokens,
        full_prefill_max_tokens=info.full_prefill_max_tokens,
        max_context_tokens=info.max_context_tokens,
        num_parameters=info.num_parameters,
        window=info.window,
        dtype=info.dtype,
        digest=info.digest,
    )
