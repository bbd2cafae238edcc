"""What becomes a state and what becomes the tail of a request, and whether it all fits."""

import hashlib
from dataclasses import dataclass

import numpy as np

from orthros_service.errors import ContextTooLongError
from orthros_service.pipeline.ports import TailFormat
from orthros_service.types import DocumentText, GenerationRequest, PrefillMode, TokenizedDocument

MIN_TAIL_TOKENS = 512
"""Tokens at the end of a long chat that always run in decode mode."""

DEFAULT_MAX_CHAT_TOKENS = 2**17
"""A chat is prefilled within its own deadline: about 80 s on one CPU worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """The lengths that decide how a prompt is run.

    Args:
        full_prefill_max_tokens: Longest prompt that may be attended to fully in prefill.
        max_context_tokens: Longest context, answer included.
        max_tail_tokens: Longest tail, answer included.
        tile: A chat's prefilled prefix is a multiple of it.
        max_chat_tokens: Longest chat without documents, answer excluded. One that fits
            `full_prefill_max_tokens` is never too long.
    """

    full_prefill_max_tokens: int
    max_context_tokens: int
    max_tail_tokens: int
    tile: int
    max_chat_tokens: int = DEFAULT_MAX_CHAT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """A prompt, split.

    Args:
        sources: What must be ready before decoding: the documents, or the prefix of a long chat.
        tail_ids: The rest, which runs in decode mode.
        num_prefix_tokens: Tokens of the caller's own prompt that became a state.
    """

    sources: tuple[DocumentText | TokenizedDocument, ...]
    tail_ids: tuple[int, ...]
    num_prefix_tokens: int = 0


class PromptPlanner:
    """Splits prompts into states and tails.

    Args:
        prompt_format: Turns messages into tokens.
        limits: The lengths in force.
    """

    def __init__(self, prompt_format: TailFormat, limits: PromptLimits) -> None:
        self._prompt_format = prompt_format
        self._limits = limits

    def plan(self, request: GenerationRequest) -> PromptPlan:
        """Tokenize a request's messages and split them; blocks.

        Raises:
            InvalidValueError: The messages are in an impossible order.
            ContextTooLongError: The tail leaves no room for an answer, or a chat is too long to
                be prefilled while its caller waits.
        """
        if request.documents:
            tail_ids = self._prompt_format.document_tail(request.messages)
            plan = PromptPlan(sources=request.documents, tail_ids=tail_ids)
        else:
            plan = self._plan_chat(request)
        # Checked before the documents are waited for: what cannot fit should not cost a prefill.
        self.fitting_max_tokens(plan, document_tokens=plan.num_prefix_tokens, wanted=1)
        return plan

    def fitting_max_tokens(self, plan: PromptPlan, *, document_tokens: int, wanted: int) -> int:
        """How many tokens of answer fit, at most as many as wanted.

        Raises:
            ContextTooLongError: Not a single one; `limit` and `actual` are tokens, the one of the
                answer included.
        """
        tail_tokens = len(plan.tail_ids)
        limits = self._limits
        if tail_tokens + 1 > limits.max_tail_tokens:
            raise ContextTooLongError(
                f"Question and history have {tail_tokens} tokens; with at least one for the answer "
                f"they may have {limits.max_tail_tokens}. Shorten them, or send the long part as a "
                "document.",
                limit=limits.max_tail_tokens,
                actual=tail_tokens + 1,
            )
        prompt_tokens = document_tokens + tail_tokens
        if prompt_tokens + 1 > limits.max_context_tokens:
            raise ContextTooLongError(
                f"Documents, question and history have {prompt_tokens} tokens; with at least one "
                f"for the answer the context holds {limits.max_context_tokens}. Use fewer or "
                "shorter documents.",
                limit=limits.max_context_tokens,
                actual=prompt_tokens + 1,
            )
        return min(
            wanted,
            limits.max_tail_tokens - tail_tokens,
            limits.max_context_tokens - prompt_tokens,
        )

    def _plan_chat(self, request: GenerationRequest) -> PromptPlan:
        ids = self._prompt_format.chat(request.messages)
        self._check_chat(len(ids))
        last_turn_start = self._prompt_format.last_user_turn_start(request.messages)
        split = self._chat_split(len(ids), last_turn_start, request.sampling.max_tokens)
        if split == 0:
            return PromptPlan(sources=(), tail_ids=ids)
        is_long = len(ids) > self._limits.full_prefill_max_tokens
        prefix = _prefix(ids[:split], "linear" if is_long else "full")
        return PromptPlan(sources=(prefix,), tail_ids=ids[split:], num_prefix_tokens=split)

    def _check_chat(self, num_tokens: int) -> None:
        limits = self._limits
        longest = max(limits.max_chat_tokens, limits.full_prefill_max_tokens)
        longest = min(longest, limits.max_context_tokens)
        if num_tokens > longest:
            raise ContextTooLongError(
                f"The messages have {num_tokens} tokens; without documents they may have "
                f"{longest}. Upload the long text to /v1/documents and ask about it: a document is "
                "read once, in its own time, for all questions.",
                limit=longest,
                actual=num_tokens,
            )

    def _chat_split(self, num_tokens: int, last_turn_start: int, max_tokens: int) -> int:
        """How many leading tokens of a chat are prefilled; 0 leaves all of it to decode mode."""
        limits = self._limits
        is_short = num_tokens <= limits.full_prefill_max_tokens
        if is_short and num_tokens + max_tokens <= limits.max_tail_tokens:
            return 0
        kept = MIN_TAIL_TOKENS
        last_turn = num_tokens - last_turn_start
        # A last turn that is itself the long text is prefilled like the rest.
        fits = last_turn + limits.tile + max_tokens <= limits.max_tail_tokens
        if last_turn <= limits.full_prefill_max_tokens and fits:
            kept = max(kept, last_turn)
        return max(0, num_tokens - kept) // limits.tile * limits.tile


def _prefix(ids: tuple[int, ...], mode: PrefillMode) -> TokenizedDocument:
    token_ids = np.array(ids, np.int32)
    no_chars = np.zeros(len(ids), np.int64)
    content = f"tokens:{mode}:".encode() + token_ids.tobytes()
    return TokenizedDocument(
        content_key=hashlib.sha256(content).hexdigest(),
        token_ids=token_ids,
        char_starts=no_chars,
        char_ends=no_chars,
        mode=mode,
    )
