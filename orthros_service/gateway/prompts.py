"""The fixed texts that become part of a prompt, and the turns that requests are made of."""

from collections.abc import Sequence
from typing import Literal

from orthros_client.types import Turn
from orthros_service.documents import check_text
from orthros_service.types import Message

SummaryStyle = Literal["paragraph", "bullets", "one_sentence"]

_SUMMARY_INSTRUCTIONS: dict[SummaryStyle, str] = {
    "paragraph": "Summarize the text above in one paragraph. Keep to what the text says.",
    "bullets": (
        "Summarize the text above as a list of its main points, one short sentence each, every "
        'line beginning with "- ". Keep to what the text says.'
    ),
    "one_sentence": "Summarize the text above in one sentence. Keep to what the text says.",
}
_FOCUS = "Write only about this: {focus}"


def summary_instruction(style: SummaryStyle, focus: str | None) -> str:
    """Return the user turn that asks for a summary.

    Args:
        style: Form of the summary.
        focus: The caller's words for what it should be about; None for the whole text.
    """
    instruction = _SUMMARY_INSTRUCTIONS[style]
    return instruction if focus is None else f"{instruction}\n{_FOCUS.format(focus=focus)}"


def conversation(
    question: str, *, instructions: str | None = None, history: Sequence[Turn] = ()
) -> tuple[Message, ...]:
    """Return the turns of a native request: instructions as system message, history, question.

    Raises:
        InvalidValueError: A text shows nothing.
    """
    messages = []
    if instructions is not None:
        content = check_text(instructions, field="instructions")
        messages.append(Message(role="system", content=content))
    for turn in history:
        content = check_text(turn.content, field="history", is_required=False)
        messages.append(Message(role=turn.role, content=content))
    return (*messages, Message(role="user", content=check_text(question, field="question")))
