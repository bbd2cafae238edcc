"""The keyword arguments of questions and summaries, written once for all methods that take them."""

from collections.abc import Sequence
from typing import Literal, TypedDict

from orthros_client.types import PrefillModeChoice, Turn


class GenerationOptions(TypedDict, total=False):
    """What questions and summaries have in common; what is left out takes the service's default.

    Exactly one of `document_ids` and `text` is needed. `deadline_s` bounds the whole call: the
    service stops its work then, and the client sends nothing again after it.
    """

    document_ids: Sequence[str] | None
    text: str | None
    prefill_mode: PrefillModeChoice
    instructions: str | None
    citations: bool
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    seed: int | None
    stop: Sequence[str]
    deadline_s: float | None


class AskOptions(GenerationOptions, total=False):
    """Arguments of `ask` and `ask_stream` after the question; `history` holds the earlier turns."""

    history: Sequence[Turn]


class SummaryOptions(GenerationOptions, total=False):
    """Arguments of `summarize` and `summarize_stream`."""

    style: Literal["paragraph", "bullets", "one_sentence"]
    focus: str | None
