"""The request of OpenAI's chat completions, as far as this service can honour it.

A parameter that would change the result and cannot be honoured is refused, unless it has the value
that leaves the result as it is. Parameters without influence on the result are accepted.
"""

import json
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic.config import JsonDict

from orthros_client.types import MAX_STOP_STRINGS, RequestModel

DEFAULT_MAX_TOKENS = 1024

# Parameter -> the values that change nothing; null always is one of them.
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
}


def _refuse_unless_neutral(value: JsonValue, info: ValidationInfo) -> JsonValue:
    neutral = _NEUTRAL.get(info.field_name or "", ())
    if value is None or any(value == one and type(value) is type(one) for one in neutral):
        return value
    hint = f" or send {json.dumps(neutral[0])}" if neutral else ""
    raise ValueError(f"this value is not supported; leave the parameter out{hint}")


def _refuse_tool_calls(value: JsonValue) -> JsonValue:
    if value is None:
        return value
    raise ValueError("tool calls are not supported; leave them and their results out")


def _content_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<parts>" if isinstance(value, list) else None


def _member_tag(name: str, value: object) -> str | None:
    tag = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return f"<{tag}>" if isinstance(tag, str) else None


def _part_kind(value: object) -> str | None:
    return _member_tag("type", value)


def _role(value: object) -> str | None:
    tag = _member_tag("role", value)
    return "<system>" if tag == "<developer>" else tag


def _refuse_file_data(value: object) -> object:
    if isinstance(value, dict) and not value.keys().isdisjoint({"file_data", "filename"}):
        raise ValueError("send the document to /v1/documents first and give its id as file_id")
    return value


def _drop_nulls(message: object) -> object:
    # Clients send back an earlier answer with all its members, most of them null or empty.
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None and value != []}


class TextPart(RequestModel):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class FileReference(RequestModel):
    """An ingested document."""

    file_id: str = Field(min_length=1, description="Id of a document, as in `/v1/documents`.")


class FilePart(RequestModel):
    """A part of a message that is a document."""

    type: Literal["file"]
    file: Annotated[FileReference, BeforeValidator(_refuse_file_data)]


# The tags in angle brackets are taken out of the field names that a caller sees.
ContentPart = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[FilePart, Tag("<file>")],
    Discriminator(
        _part_kind,
        custom_error_type="content_part",
        custom_error_message="the type of a content part must be 'text' or 'file'",
    ),
]
Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[ContentPart], Field(min_length=1, max_length=1_000), Tag("<parts>")],
    Discriminator(
        _content_kind,
        custom_error_type="content",
        custom_error_message="must be a string or a list of content parts",
    ),
]


# Null and [] never get this far.
ToolCalls = Annotated[JsonValue, AfterValidator(_refuse_tool_calls)]


class SystemMessage(RequestModel):
    """Instructions; `developer` is the newer name of the role."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(RequestModel):
    """A question; `file` parts name ingested documents."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(RequestModel):
    """An earlier answer; without content it is its refusal, or empty."""

    role: Literal["assistant"]
    content: Content = ""
    refusal: str | None = None
    name: str | None = None
    tool_calls: ToolCalls = None
    function_call: ToolCalls = None


ChatMessage = Annotated[
    Annotated[SystemMessage, Tag("<system>")]
    | Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")],
    Discriminator(
        _role,
        custom_error_type="role",
        custom_error_message="the role must be system, developer, user or assistant",
    ),
    BeforeValidator(_drop_nulls),
]

Neutral = Annotated[JsonValue, AfterValidator(_refuse_unless_neutral)]
StopString = Annotated[str, Field(min_length=1, max_length=200)]
Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("<parts>")],
    Discriminator(
        _content_kind,
        custom_error_type="stop",
        custom_error_message="must be a string or a list of strings",
    ),
]


class StreamOptions(RequestModel):
    """What a stream carries beside text."""

    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="Accepted; no padding is added.")


_EXAMPLE: JsonDict = {
    "model": "smollm2-135m-instruct",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "file", "file": {"file_id": "doc_0123456789abcdef01234567"}},
                {"type": "text", "text": "Who wrote the letter?"},
            ],
        }
    ],
    "max_tokens": 64,
}


class ChatCompletionRequest(RequestModel):
    """Body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra={"example": _EXAMPLE})

    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=1_000)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description=f"{DEFAULT_MAX_TOKENS} by default; lowered to what fits."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="The newer name of max_tokens."
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0 by default, as everywhere in this service: answers are repeatable."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Stop | None = None

    # They would change the result; only what leaves it as it is may be sent.
    audio: Neutral = None
    frequency_penalty: Neutral = None
    function_call: Neutral = None
    functions: Neutral = None
    logit_bias: Neutral = None
    logprobs: Neutral = None
    modalities: Neutral = None
    n: Neutral = None
    prediction: Neutral = None
    presence_penalty: Neutral = None
    reasoning_effort: Neutral = None
    response_format: Neutral = None
    tool_choice: Neutral = None
    tools: Neutral = None
    top_logprobs: Neutral = None
    verbosity: Neutral = None
    web_search_options: Neutral = None

    # They have no influence on the result.
    metadata: JsonValue = None
    parallel_tool_calls: JsonValue = None
    prompt_cache_key: JsonValue = None
    prompt_cache_retention: JsonValue = None
    safety_identifier: JsonValue = None
    service_tier: JsonValue = None
    store: JsonValue = None
    user: JsonValue = None

    @model_validator(mode="after")
    def _are_consistent(self) -> Self:
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams; set stream to true")
        return self

    @property
    def token_limit(self) -> int:
        """The most tokens to generate."""
        return self.max_completion_tokens or self.max_tokens or DEFAULT_MAX_TOKENS

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts that end the answer."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
