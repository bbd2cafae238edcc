"""Text to tokens and back: the tokenizer, the prompt format and streamed decoding."""

from orthros_service.tokenization.encoding import TextEncoding
from orthros_service.tokenization.prompt import PromptFormat
from orthros_service.tokenization.stream import TextStream
from orthros_service.tokenization.template import SYSTEM_TEXT, ChatTemplate
from orthros_service.tokenization.tokenizer import Tokenizer

__all__ = ["SYSTEM_TEXT", "ChatTemplate", "PromptFormat", "TextEncoding", "TextStream", "Tokenizer"]
