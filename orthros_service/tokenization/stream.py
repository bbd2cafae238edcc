"""Decoding one token at a time into text that is never taken back."""

from orthros_service.tokenization.tokenizer import Tokenizer


class TextStream:
    """Turns the tokens of one answer into text as they come; not thread-safe.

    The pieces together equal `tokenizer.decode` of all ids. A U+FFFD at the end may be an
    unfinished character, so it waits for more tokens or for `flush`. (The `DecodeStream` of
    `tokenizers` holds back a whole run of them and has no flush.)

    Tokenizers with byte tokens decode a run of bytes to U+FFFD only, as long as any of it is
    invalid. There a whole run waits; and where an invalid byte follows characters that were shown,
    they stay, though `decode` would now turn them into U+FFFD too.

    Args:
        tokenizer: Decodes; special tokens stand for no text.
    """

    __slots__ = ("_context", "_context_text", "_num_shown", "_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoders may drop a space in front of the first token, so new tokens are decoded behind
        # the last ones that made whole characters.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._num_shown = 0

    def push(self, token_id: int) -> str:
        """Take the next token.

        Args:
            token_id: Any id of the vocabulary.

        Returns:
            The text that became complete; empty while a character is unfinished.
        """
        if token_id in self._tokenizer.skipped_ids:
            return ""
        self._pending.append(token_id)
        text = self._pending_text()
        is_open = text.endswith("\ufffd")
        if is_open and self._tokenizer.has_byte_tokens:
            return ""
        new = text[self._num_shown : len(text) - is_open]
        self._num_shown += len(new)
        if text and not is_open:
            self._context, self._pending = self._pending, []
            self._context_text = self._tokenizer.decode(self._context)
            self._num_shown = 0
        return new

    def flush(self) -> str:
        """The text that was still held back; the stream is empty afterwards."""
        rest = self._pending_text()[self._num_shown :]
        self._context, self._context_text, self._pending, self._num_shown = [], "", [], 0
        return rest

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        text = self._tokenizer.decode(self._context + self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._tokenizer.decode(self._pending)
