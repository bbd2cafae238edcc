"""The OpenAPI document: what every error looks like, and the tags."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel

from orthros_client.types import Problem
from orthros_service.gateway.problems import title_of

DESCRIPTION = """\
Ingest a long document once in linear time, then ask it many times with full attention.

* Errors on `/v1/chat/completions` and `/v1/models` have OpenAI's shape; everywhere else they are
  RFC 9457 problem documents. Both carry the same stable `code`, and the `request_id`.
* `Retry-After` is sent with retryable errors when the time to come back is known.
* JSON bodies are UTF-8 without repeated keys, NaN or Infinity. Unknown fields are refused.
* Character offsets are Unicode code points of the stored text.
"""

TAGS = [
    {"name": "documents", "description": "Ingest texts and follow their progress."},
    {"name": "answers", "description": "Ask and summarize documents, with citations."},
    {"name": "openai", "description": "Works with OpenAI clients by changing the base URL."},
    {"name": "models", "description": "What is served, and how long texts are in its tokens."},
    {"name": "operations", "description": "Health and metrics."},
]

_DESCRIPTIONS = {
    400: "`malformed_request`: the body cannot be read.",
    404: "`not_found`: no such document, model or path.",
    409: "`document_not_ready`: still being ingested (with Retry-After and progress), or failed.",
    413: "`document_too_large` or `context_length_exceeded`, with `limit` and `actual`.",
    415: "`unsupported_document`: another Content-Type than those listed.",
    422: "`invalid_value`, `empty_document` or `invalid_text`; `errors` lists the wrong fields.",
    429: "`overloaded`, with Retry-After.",
    500: "`internal`, `engine_error` or `state_error`; the request_id names it in the logs.",
    503: "`unavailable`: a worker cannot be reached; send the request again.",
    504: "`deadline_exceeded`: not done within `deadline_s`.",
}
_OPENAI_DESCRIPTIONS = {
    400: (
        "`invalid_request_error` with the code `malformed_request`, `invalid_value`, "
        "`invalid_text` or `context_length_exceeded`; `param` names the first wrong field."
    ),
    404: "`model_not_found`, or `not_found`: no such document.",
    413: "`document_too_large`, with `limit` and `actual`.",
}
_EXAMPLE_CODES = {
    400: "malformed_request",
    404: "not_found",
    409: "document_not_ready",
    413: "document_too_large",
    415: "unsupported_document",
    422: "invalid_value",
    429: "overloaded",
    500: "internal",
    503: "unavailable",
    504: "deadline_exceeded",
}
_OPENAI_ERROR = "OpenAIError"
_OPENAI_ERROR_SCHEMA = {
    "title": _OPENAI_ERROR,
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "request_id": {"type": "string"},
            },
        }
    },
}

Responses = dict[int | str, dict[str, Any]]


def problems(*statuses: int) -> Responses:
    """Document these error statuses, and 500, as problem documents."""
    return {status: _problem(status) for status in (*statuses, 500)}


def openai_errors(*statuses: int) -> Responses:
    """Document these error statuses, and 500, in OpenAI's shape."""
    schema = {"$ref": f"#/components/schemas/{_OPENAI_ERROR}"}
    return {
        status: {
            "description": _OPENAI_DESCRIPTIONS.get(status, _DESCRIPTIONS[status]),
            "content": {"application/json": {"schema": schema}},
        }
        for status in (*statuses, 500)
    }


def _problem(status: int) -> dict[str, Any]:
    code = _EXAMPLE_CODES[status]
    example = {
        "type": f"urn:orthros:problem:{code}",
        "title": title_of(code),
        "status": status,
        "detail": "One sentence: what was wrong, what is allowed, what to do.",
        "code": code,
        "retryable": status in (409, 429, 503, 504),
        "request_id": "req_5f1c0a6be2d94c7f8a3b1e20",
    }
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        "description": _DESCRIPTIONS[status],
        "content": {"application/problem+json": {"schema": schema, "example": example}},
    }


def json_body(model_name: str) -> dict[str, Any]:
    """Document a JSON body whose schema is a model of the wire types."""
    return {"schema": {"$ref": f"#/components/schemas/{model_name}"}}


def operation_id(route: APIRoute) -> str:
    """Name an operation after its function, as generated clients will call it."""
    return route.endpoint.__name__


def _remove_fastapi_errors(document: dict[str, Any]) -> None:
    # FastAPI adds its own 422 to every operation with parameters, in a shape that is never sent.
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for methods in document["paths"].values():
        for operation in methods.values():
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]


def install_openapi(app: FastAPI, *extra_models: type[BaseModel]) -> None:
    """Make the app's OpenAPI document hold the shared error schemas and models read by hand.

    Args:
        app: The application; its routes may still change until the document is asked for.
        extra_models: Pydantic models that no route declares to FastAPI.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                tags=TAGS,
                routes=app.routes,
            )
            _remove_fastapi_errors(document)
            schemas = document["components"]["schemas"]
            models: list[type[BaseModel]] = [Problem, *extra_models]
            for model in models:
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
            schemas[_OPENAI_ERROR] = _OPENAI_ERROR_SCHEMA
            document["components"]["schemas"] = dict(sorted(schemas.items()))
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
