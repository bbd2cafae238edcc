"""The prompt format: one header before every document, one tail behind it, or a plain chat."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from orthros_service.errors import InvalidValueError, ModelError
from orthros_service.tokenization.template import (
    FIXED_TIME,
    SEPARATOR,
    SYSTEM_TEXT,
    ChatTemplate,
)
from orthros_service.tokenization.tokenizer import Tokenizer
from orthros_service.types import Message, PrefillMode, TokenizedDocument

_FIXED_SYSTEM = Message(role="system", content=SYSTEM_TEXT)
_USER = Message(role="user", content="")
_ASSISTANT = Message(role="assistant", content="")


def _now() -> datetime:
    return datetime.now(UTC)


class PromptFormat:
    """How messages and documents become token ids, after the model's chat template.

    The template's own text is encoded with control tokens, contents as plain text, each on its
    own, so no content can change the prompt's structure. With documents the prompt is
    `header + document + tail`:

    * header: the system turn with `SYSTEM_TEXT`, and the opening of the user turn; for a template
      without a system turn, the opening, `SYSTEM_TEXT` and a separator.
    * tail: separator, the caller's system messages and a separator (if there are any), the first
      question, its end of turn, all further turns, and the assistant's opening.

    Args:
        tokenizer: The model's tokenizer, with its chat template.
        clock: What a template's date in a chat without documents is taken from.

    Attributes:
        header_ids: [n] int32, the same for every document. Read-only.

    Raises:
        ModelError: The template cannot render a user turn.
    """

    def __init__(self, tokenizer: Tokenizer, *, clock: Callable[[], datetime] = _now) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template
        self._clock = clock
        self._has_system_turn = _has_system_turn(self._template)
        self._user_opening = _user_opening(self._template)
        if self._has_system_turn:
            self._header = self._template.split([_FIXED_SYSTEM, _USER], now=FIXED_TIME)[:2]
            ids = self._encode(self._header, (SYSTEM_TEXT,), is_start=True)
        else:
            self._header = self._template.split([_USER], now=FIXED_TIME)[:1]
            ids = self._encode(self._header, (SYSTEM_TEXT + SEPARATOR,), is_start=True)
        self.header_ids: npt.NDArray[np.int32] = np.array(ids, np.int32)
        self.header_ids.setflags(write=False)

    def tokenize_document(
        self, text: str, content_key: str, mode: PrefillMode
    ) -> TokenizedDocument:
        """Header and text as tokens with their spans.

        Args:
            text: The document's normalized text.
            content_key: Names the content.
            mode: The prefill mode that was chosen for it.
        """
        encoding = self._tokenizer.encode_text(text)
        no_chars = np.zeros(self.header_ids.shape[0], np.int64)
        return TokenizedDocument(
            content_key=content_key,
            token_ids=np.concatenate([self.header_ids, encoding.token_ids]),
            char_starts=np.concatenate([no_chars, encoding.char_starts]),
            char_ends=np.concatenate([no_chars, encoding.char_ends]),
            mode=mode,
        )

    def document_tail(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Everything after the documents.

        Args:
            messages: Any number of system messages, which are the caller's instructions, then
                user and assistant in turn; the last is the user's.

        Raises:
            InvalidValueError: The messages are in another order.
        """
        instructions, turns = _split_messages(messages)
        if self._has_system_turn:
            parts = self._template.split([_FIXED_SYSTEM, *turns], now=FIXED_TIME)
        else:
            parts = self._template.split(turns, now=FIXED_TIME)
        if parts[: len(self._header)] != self._header:
            raise ModelError(
                "The chat template opens this conversation in another way than a single question, "
                "so it cannot be used with documents."
            )
        first = SEPARATOR.join(["", *instructions, turns[0].content])
        contents = (first, *(turn.content for turn in turns[1:]))
        return tuple(self._encode(("", *parts[len(self._header) :]), contents, is_start=False))

    def answer_end(self) -> int:
        """The token that the template puts behind an answer; decoding stops there.

        Raises:
            ModelError: The template puts another token there than those that end an answer.
        """
        parts = self._template.split([_USER, _ASSISTANT, _USER], now=FIXED_TIME)
        ids = self._encode(parts[2:3], (), is_start=False)
        if not ids or ids[0] not in self._tokenizer.stop_ids:
            raise ModelError(
                "The chat template ends an answer with no token that ends decoding; set "
                "eos_token_id in generation_config.json to the one that it uses."
            )
        return ids[0]

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The whole prompt of a conversation without documents.

        The caller's system messages form the system turn; without any, the template decides.

        Args:
            messages: As for `document_tail`.

        Raises:
            InvalidValueError: The messages are in another order.
        """
        parts, contents = self._chat_parts(messages)
        return tuple(self._encode(parts, contents, is_start=True))

    def last_user_turn_start(self, messages: Sequence[Message]) -> int:
        """Index in `chat(messages)` of the token that opens the last user turn.

        Where a template prints more in front of that turn than its usual opening (a system text
        inside the user turn), the turn begins with that.

        Raises:
            InvalidValueError: The messages are in another order.
        """
        parts, contents = self._chat_parts(messages)
        before = self._encode(parts[:-2], contents[:-1], is_start=True)
        opening = self._tokenizer.encode_template(parts[-2], is_start=len(parts) == 2)
        begin = parts[-2].rfind(self._user_opening) if self._user_opening else 0
        return len(before) + int(np.searchsorted(opening.char_starts, max(begin, 0)))

    def _chat_parts(self, messages: Sequence[Message]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        instructions, turns = _split_messages(messages)
        system = SEPARATOR.join(instructions)
        if instructions and self._has_system_turn:
            turns = (Message(role="system", content=system), *turns)
        elif instructions:
            first = Message(role="user", content=system + SEPARATOR + turns[0].content)
            turns = (first, *turns[1:])
        parts = self._template.split(turns, now=self._clock())
        return parts, tuple(turn.content for turn in turns)

    def _encode(
        self, parts: Sequence[str], contents: Sequence[str], *, is_start: bool
    ) -> list[int]:
        """Encode parts and contents in turn: part, content, part, ..."""
        ids: list[int] = []
        for index, part in enumerate(parts):
            template = self._tokenizer.encode_template(part, is_start=is_start and index == 0)
            ids += template.token_ids.tolist()
            if index < len(contents):
                ids += self._tokenizer.encode_text(contents[index]).token_ids.tolist()
        return ids


def _split_messages(messages: Sequence[Message]) -> tuple[list[str], tuple[Message, ...]]:
    """Take the leading system messages off, and check the order of the others."""
    num_system = 0
    while num_system < len(messages) and messages[num_system].role == "system":
        num_system += 1
    turns = tuple(messages[num_system:])
    if not turns:
        raise InvalidValueError("The messages hold no user turn; add at least one.")
    for index, turn in enumerate(turns):
        wanted = "user" if index % 2 == 0 else "assistant"
        if turn.role != wanted:
            raise InvalidValueError(
                f"Message {num_system + index} has the role '{turn.role}' where '{wanted}' is "
                "needed: system messages come first, then user and assistant in turn.",
                position=num_system + index,
            )
    if turns[-1].role != "user":
        raise InvalidValueError("The last message must be the user's; it is the assistant's.")
    return [message.content for message in messages[:num_system]], turns


def _has_system_turn(template: ChatTemplate) -> bool:
    """Whether a system text comes first and the same, however long the conversation is."""
    conversation = [_FIXED_SYSTEM, _USER, _ASSISTANT, _USER]
    try:
        long = template.split(conversation, now=FIXED_TIME)
        short = template.split(conversation[:2], now=FIXED_TIME)
    except ModelError:
        return False
    return long[:2] == short[:2]


def _user_opening(template: ChatTemplate) -> str:
    """What the template prints between an earlier turn and a user's content; "" if unclear."""
    conversation = [_USER, _ASSISTANT, _USER]
    try:
        whole = template.split(conversation, now=FIXED_TIME)
        before = template.split(conversation[:2], add_generation_prompt=False, now=FIXED_TIME)
    except ModelError:
        return ""
    return whole[2].removeprefix(before[2]) if whole[2].startswith(before[2]) else ""
