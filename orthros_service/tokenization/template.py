"""Rendering a model's chat template, and finding where its own text ends and contents begin."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orthros_service.errors import ModelError
from orthros_service.types import Message

logger = logging.getLogger(__name__)

SYSTEM_TEXT = (
    "You are a careful reader. Answer from the text that the user gives you. "
    "If the text does not hold the answer, say so."
)
"""The fixed system text in front of every document."""

SEPARATOR = "\n\n"
"""What stands between a document, the caller's instructions and the question."""

PROMPT_FORMAT = f"1\n{SYSTEM_TEXT}\n{SEPARATOR}"
"""Part of the tokenizer's digest: states made with another prompt format never match."""

FIXED_TIME = datetime(2025, 1, 1, tzinfo=UTC)
"""The date that a template sees in front of a document: its state outlives the day it was made."""

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message.role | capitalize }}:\n{{ message.content }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
"""For models without a template: `Role:`, the content on its own lines, a blank line."""


class ChatTemplate:
    """A Jinja chat template in a sandbox, as `transformers` would render it.

    Args:
        source: The template; None takes `PLAIN_TEMPLATE`.
        special_texts: Named special tokens that the template may print, such as "bos_token".

    Attributes:
        source: The template in use.

    Raises:
        ModelError: The template has a syntax error.
    """

    def __init__(self, source: str | None, *, special_texts: Mapping[str, str]) -> None:
        if source is None:
            logger.warning("The model has no chat template; its prompts use the plain format")
        self.source = PLAIN_TEMPLATE if source is None else source
        self._special_texts = dict(special_texts)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"The chat template is not valid Jinja: {error}. Correct chat_template.jinja, or "
                "`chat_template` in tokenizer_config.json."
            ) from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, now: datetime
    ) -> str:
        """The prompt as text. Thinking is switched off where a template knows the switch.

        Raises:
            ModelError: The template refuses these roles, or fails.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                self._special_texts,
                messages=turns,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=False,
                tools=None,
                documents=None,
                strftime_now=now.strftime,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            roles = ", ".join(message.role for message in messages)
            raise ModelError(
                f"The chat template does not render turns of the roles {roles}: {error}."
            ) from error

    def split(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        now: datetime,
    ) -> tuple[str, ...]:
        """The template's own text around the contents: one part more than messages.

        Contents are left out of the rendering, so they can neither steer nor imitate the template.

        Raises:
            ModelError: The template refuses these roles, or does not print every content exactly
                once, in order.
        """
        marks = [f"x{secrets.token_hex(16)}x" for _ in messages]
        marked = [
            Message(role=message.role, content=mark)
            for message, mark in zip(messages, marks, strict=True)
        ]
        rest = self.render(marked, add_generation_prompt=add_generation_prompt, now=now)
        parts = []
        for mark in marks:
            part, found, rest = rest.partition(mark)
            if not found or mark in rest:
                roles = ", ".join(message.role for message in messages)
                raise ModelError(
                    "The chat template does not print each content once and in order, for turns "
                    f"of the roles {roles}."
                )
            parts.append(part)
        return (*parts, rest)


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on; rendered, it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
