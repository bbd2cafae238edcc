"""The wire types of the native API, shared by the client and the gateway.

Requests are strict: unknown fields, numbers given as strings and non-finite numbers are refused.
Responses allow unknown fields, so that an older client reads a newer service. Offsets are Unicode
code points.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

PrefillModeChoice = Literal["auto", "full", "linear"]
DocumentStatus = Literal["queued", "ingesting", "ready", "failed"]
FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_DOCUMENTS = 32
MAX_STOP_STRINGS = 16
MAX_METADATA_PAIRS = 16
MAX_TITLE_CHARS = 500


def _refuse_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must hold more than white space")
    return text


# Words that become part of a prompt.
PromptText = Annotated[str, Field(min_length=1), AfterValidator(_refuse_blank)]
MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class RequestModel(BaseModel):
    """Base of everything that a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class ResponseModel(BaseModel):
    """Base of everything that the service sends."""

    model_config = ConfigDict(extra="ignore", frozen=True)


# Documents


class DocumentCreate(RequestModel):
    """Body of `POST /v1/documents` as JSON; the text can also be sent as `text/plain`."""

    text: str
    title: str | None = Field(None, max_length=MAX_TITLE_CHARS)
    metadata: dict[MetadataKey, MetadataValue] = Field(
        default_factory=dict,
        max_length=MAX_METADATA_PAIRS,
        description="At most 16 pairs of short strings.",
    )
    prefill_mode: PrefillModeChoice = Field("auto", description="'auto' lets the length decide.")


class ProblemSummary(ResponseModel):
    """Why a document failed."""

    code: str
    message: str


class PrefillInfo(ResponseModel):
    """How a document was or is being ingested."""

    mode: Literal["full", "linear"] | None = None
    tokens_done: int = 0
    tokens_total: int | None = None
    tokens_per_s: float | None = None


class Document(ResponseModel):
    """A document and how far its ingestion has come."""

    id: str
    object: Literal["document"] = "document"
    status: DocumentStatus
    title: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    num_chars: int
    num_tokens: int | None = None
    prefill: PrefillInfo
    error: ProblemSummary | None = None
    created_at: str = Field(description="RFC 3339, UTC.")


class DocumentList(ResponseModel):
    """One page of documents, newest first."""

    object: Literal["list"] = "list"
    data: list[Document]
    has_more: bool
    next_after: str | None = Field(None, description="Pass as `after` to get the next page.")


class DocumentDeleted(ResponseModel):
    """Answer to `DELETE /v1/documents/{id}`."""

    id: str
    object: Literal["document.deleted"] = "document.deleted"
    deleted: bool = True


# Answers and summaries


class Turn(RequestModel):
    """One earlier question or answer of a follow-up conversation."""

    role: Literal["user", "assistant"]
    content: str = Field(min_length=1)


class _Generation(RequestModel):
    document_ids: list[str] | None = Field(None, min_length=1, max_length=MAX_DOCUMENTS)
    text: str | None = Field(None, description="Inline text instead of document_ids.")
    prefill_mode: PrefillModeChoice = Field("auto", description="For inline text only.")
    instructions: Annotated[PromptText, Field(max_length=20_000)] | None = None
    stream: bool = False
    citations: bool = True
    max_tokens: Annotated[int, Field(ge=1, le=32_768)] = 256
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(
        default_factory=list, max_length=MAX_STOP_STRINGS
    )
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "_Generation":
        if (self.document_ids is None) == (self.text is None):
            raise ValueError("give exactly one of document_ids and text")
        if self.document_ids is not None and len(set(self.document_ids)) != len(self.document_ids):
            raise ValueError("document_ids names a document twice; name each once")
        return self


class AnswerRequest(_Generation):
    """Body of `POST /v1/answers`."""

    question: PromptText
    history: list[Turn] = Field(
        default_factory=list, description="Earlier turns: user, assistant, user, assistant..."
    )

    @model_validator(mode="after")
    def _alternating(self) -> "AnswerRequest":
        for index, turn in enumerate(self.history):
            if turn.role != ("user", "assistant")[index % 2]:
                raise ValueError("history must alternate user, assistant and begin with user")
        if len(self.history) % 2:
            raise ValueError(
                "history must end with an assistant turn; the new question goes into `question`"
            )
        return self


class SummaryRequest(_Generation):
    """Body of `POST /v1/summaries`."""

    style: Literal["paragraph", "bullets", "one_sentence"] = "paragraph"
    focus: Annotated[PromptText, Field(max_length=2_000)] | None = Field(
        None, description="What the summary should be about."
    )


class Citation(ResponseModel):
    """A passage that supports the answer; `quote` equals the stored text between the offsets."""

    document_id: str | None
    start_char: int
    end_char: int
    quote: str
    answer_start: int
    answer_end: int
    score: float


class Usage(ResponseModel):
    """Token counts of one request."""

    document_tokens: int
    prompt_tokens: int = Field(
        description="Question, history and template; the document is counted apart."
    )
    completion_tokens: int
    max_tokens: int = Field(description="The limit in force, after clamping to what fits.")


class TimingsInfo(ResponseModel):
    """Seconds per phase."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


class Answer(ResponseModel):
    """A finished answer or summary."""

    id: str
    object: Literal["answer", "summary"]
    model: str
    converted: bool = Field(
        description="Whether the model's weights were trained for linear prefill."
    )
    text: str
    finish_reason: FinishReason
    citations: list[Citation]
    usage: Usage
    timings: TimingsInfo
    warnings: list[str] = Field(default_factory=list)


class AnswerDelta(ResponseModel):
    """`event: delta` of a streamed answer."""

    text: str


# Tokens and models


class TokenCountRequest(RequestModel):
    """Body of `POST /v1/tokens:count`."""

    text: str


class TokenCount(ResponseModel):
    """How many tokens a text is, and how it would be ingested."""

    num_tokens: int = Field(description="Tokens of the text alone.")
    document_tokens: int = Field(
        description="Tokens of a document with this text: the fixed header is counted too."
    )
    num_chars: int = Field(description="Code points after normalization.")
    prefill_mode: Literal["full", "linear"]


class ModelCard(ResponseModel):
    """One served model; readable by OpenAI clients too."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "orthros"
    converted: bool
    trained_context_tokens: int
    full_prefill_max_tokens: int
    max_context_tokens: int
    num_parameters: int
    window: int
    dtype: str
    digest: str


class ModelList(ResponseModel):
    """Answer to `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


# Errors


class Problem(BaseModel):
    """RFC 9457 problem document with our members; others, such as `limit`, may follow."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    title: str
    status: int
    detail: str
    code: str
    phase: str | None = None
    retryable: bool = False
    retry_after_s: float | None = None
    request_id: str | None = None
    errors: list[dict[str, Any]] | None = Field(
        None, description="One entry per wrong field: field, message."
    )
