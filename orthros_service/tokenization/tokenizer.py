"""The tokenizer: text becomes plain tokens, template text may hold control tokens."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self

import tokenizers

from orthros_service.errors import InvalidTextError, ModelError
from orthros_service.tokenization.encoding import (
    GROUP_PIECES,
    PIECE_CHARS,
    TextEncoding,
    has_safe_borders,
    join_encodings,
    safe_pieces,
    without_control_tokens,
)
from orthros_service.tokenization.template import PROMPT_FORMAT, ChatTemplate
from orthros_service.tokenization.tokenizer_files import TokenizerFiles, read_tokenizer_files


class Tokenizer:
    """The one door between text and token ids. Thread-safe: nothing changes after construction.

    Two encoders are built from one tokenizer.json: `encode_text` and `count_tokens` know no added
    tokens, so nothing in a text can become a control token; `encode_template` knows them all and
    is only ever given text of the chat template.

    Args:
        files: What the model directory holds.
        directory: Where it is, for messages.

    Attributes:
        chat_template: The model's chat template; a plain one if it has none.
        digest: SHA-256 hex of everything that decides how a prompt becomes tokens.
        stop_ids: Token ids that end an answer.
        added_ids: Ids of all control and other added tokens; no text encodes to one.
        skipped_ids: Ids that stand for no text when an answer is decoded.
        vocab_size: One past the largest token id.
        has_byte_tokens: Whether bytes outside the vocabulary are tokens of their own, whose decode
            depends on the bytes around them.

    Raises:
        ModelError: A file is broken, or the tokenizer cannot keep control tokens out of text.
    """

    def __init__(self, files: TokenizerFiles, directory: Path) -> None:
        path = directory / "tokenizer.json"
        self._full = _build(path, files.tokenizer_spec)
        plain_spec = without_control_tokens(files.tokenizer_spec)
        self._plain = _build(path, plain_spec)
        self._has_safe_borders = has_safe_borders(plain_spec)
        added = self._full.get_added_tokens_decoder()
        self._added_texts = tuple(token.content for token in added.values())
        self.added_ids = frozenset(added)
        self.skipped_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.vocab_size = 1 + max(self._full.get_vocab(with_added_tokens=True).values())
        self.has_byte_tokens = "ByteFallback" in json.dumps(files.tokenizer_spec.get("decoder"))
        self.chat_template = ChatTemplate(files.chat_template, special_texts=files.special_texts)
        self.digest = _digest(files, self.chat_template)
        self.stop_ids = self._find_stop_ids(files, directory)
        self._check_control_tokens_are_text(path)

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Load the tokenizer of a Hugging Face or Orthros model directory.

        Raises:
            ModelError: Names the file that is missing or broken, and the cure.
        """
        return cls(read_tokenizer_files(directory), directory)

    def encode_text(self, text: str, *, piece_chars: int = PIECE_CHARS) -> TextEncoding:
        """Encode a text as data: whatever it holds, no control token comes out.

        Time is linear and memory beside the result bounded where the text can be cut safely.

        Args:
            text: Any text without lone surrogates.
            piece_chars: Characters per piece; the result does not depend on it.

        Raises:
            InvalidTextError: The text holds a lone surrogate.
        """
        return join_encodings(self._encoded_pieces(text, piece_chars), num_chars=len(text))

    def count_tokens(self, text: str) -> int:
        """How many tokens `encode_text` makes of a text.

        Raises:
            InvalidTextError: The text holds a lone surrogate.
        """
        return sum(
            len(encoding)
            for group in self._groups(text, PIECE_CHARS)
            for encoding in self._plain.encode_batch_fast(
                [piece for _, piece in group], add_special_tokens=False
            )
        )

    def encode_template(self, text: str, *, is_start: bool) -> TextEncoding:
        """Encode text of the chat template, control tokens recognised. Never give it other text.

        Args:
            text: A part of a rendered template.
            is_start: Whether the prompt begins here, where some tokenizers add a space.
        """
        found = (text.find(added) for added in self._added_texts)
        first_added = min((at for at in found if at >= 0), default=len(text))
        head = 0 if is_start else first_added
        plain = self._plain.encode(text[:head], add_special_tokens=False)
        full = self._full.encode(text[head:], add_special_tokens=False)
        return join_encodings([(0, plain), (head, full)], num_chars=len(text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some tokens; bytes that are not UTF-8 become U+FFFD."""
        return str(self._full.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _encoded_pieces(
        self, text: str, piece_chars: int
    ) -> Iterator[tuple[int, tokenizers.Encoding]]:
        for group in self._groups(text, piece_chars):
            texts = [piece for _, piece in group]
            encodings = self._plain.encode_batch(texts, add_special_tokens=False)
            yield from zip((start for start, _ in group), encodings, strict=True)

    def _groups(self, text: str, piece_chars: int) -> Iterator[list[tuple[int, str]]]:
        _check_no_surrogates(text)
        if not self._has_safe_borders:
            piece_chars = max(1, len(text))
        pieces = safe_pieces(text, piece_chars)
        while group := list(islice(pieces, GROUP_PIECES)):
            yield group

    def _find_stop_ids(self, files: TokenizerFiles, directory: Path) -> frozenset[int]:
        ids = set(files.eos_ids)
        for name in ("eos_token", "eot_token"):
            text = files.special_texts.get(name)
            if text is not None and (token_id := self._full.token_to_id(text)) is not None:
                ids.add(token_id)
        if not ids:
            raise ModelError(
                f"{directory} names no token that ends an answer; set `eos_token_id` in its "
                "generation_config.json."
            )
        if outside := sorted(id_ for id_ in ids if not 0 <= id_ < self.vocab_size):
            raise ModelError(
                f"{directory}: the end ids {outside} are outside tokenizer.json's vocabulary of "
                f"{self.vocab_size}; correct `eos_token_id` in generation_config.json or "
                "config.json."
            )
        return frozenset(ids)

    def _check_control_tokens_are_text(self, path: Path) -> None:
        for text in self._added_texts:
            ids = self._plain.encode(text, add_special_tokens=False).ids
            if not self.added_ids.isdisjoint(ids):
                raise ModelError(
                    f"{path}: the text {text!r} encodes to a control token even as plain text, so "
                    "documents could change the prompt. Use a tokenizer.json whose added tokens "
                    "are not reachable from its model's vocabulary."
                )


def _build(path: Path, spec: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        built = tokenizers.Tokenizer.from_str(json.dumps(spec))
    # The library raises the bare Exception.
    except Exception as error:
        raise ModelError(
            f"{path} is not a tokenizer that this version reads: {error}. Copy it again from the "
            "model's original directory; for the default model run `orthros models prepare`."
        ) from error
    # A tokenizer.json may ask for truncation, which would lose text without a word.
    built.no_truncation()
    built.no_padding()
    return built


def _digest(files: TokenizerFiles, template: ChatTemplate) -> str:
    parts = [template.source, PROMPT_FORMAT, json.dumps(sorted(files.special_texts.items()))]
    digest = hashlib.sha256(hashlib.sha256(files.tokenizer_json).digest())
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def _check_no_surrogates(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidTextError(
            f"The text holds a lone surrogate at character {error.start}; send whole characters.",
            position=error.start,
        ) from error
