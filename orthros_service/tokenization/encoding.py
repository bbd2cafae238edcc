"""Encoding text as plain text: no control tokens, exact character spans, linear time."""

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

PIECE_CHARS = 16_384
"""Fewest characters of a piece; longer pieces only where no safe border comes earlier."""

GROUP_PIECES = 64
"""Pieces handed to the tokenizer at a time, which bounds the memory beside the result."""

_KNOWN_SPLITS = frozenset(
    {
        # Llama 3, Qwen 2 and 3 (with single digits), and the GPT-4 pattern they come from.
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        # GPT-2, written out.
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    }
)

# In every known pattern a word ends before " x", and "\n" ends its own match before a character
# that is not white space, whatever stands further left or right. Two characters that old Unicode
# tables call white space are left out.
_SAFE_BORDER = re.compile(
    r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=[^\s\u180e\u200b]\n)(?=[^\s\u180e\u200b])"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextEncoding:
    """The tokens of a text and the characters that each covers.

    Spans are code points, never go back, and leave no gap: the tokens of one character share its
    span, and characters that left no token belong to the token before them.

    Args:
        token_ids: [n] int32.
        char_starts: [n] int64, first code point.
        char_ends: [n] int64, one past the last code point.
    """

    token_ids: npt.NDArray[np.int32]
    char_starts: npt.NDArray[np.int64]
    char_ends: npt.NDArray[np.int64]


def without_control_tokens(spec: dict[str, Any]) -> dict[str, Any]:
    """Make of a tokenizer's JSON one that knows no added tokens and adds nothing to a text.

    Prompts are put together from separately encoded parts, so the space that some tokenizers put
    before a text would land in the middle of the prompt: it goes too.

    Args:
        spec: Parsed tokenizer.json; not modified.
    """
    plain = copy.copy(spec)
    plain.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    plain["normalizer"] = _without_prefix(copy.deepcopy(spec.get("normalizer")), "normalizers")
    plain["pre_tokenizer"] = _without_prefix(
        copy.deepcopy(spec.get("pre_tokenizer")), "pretokenizers"
    )
    return plain


def _without_prefix(step: dict[str, Any] | None, children: str) -> dict[str, Any] | None:
    if step is None or step.get("type") == "Prepend":
        return None
    if step.get("type") == "Sequence":
        kept = [_without_prefix(child, children) for child in step[children]]
        step[children] = [child for child in kept if child is not None]
    elif step.get("type") == "Metaspace":
        step["prepend_scheme"] = "never"
    elif step.get("type") == "ByteLevel":
        step["add_prefix_space"] = False
    return step


def has_safe_borders(spec: dict[str, Any]) -> bool:
    """Whether a text may be cut at `_SAFE_BORDER` without changing its tokens.

    True only for the pre-tokenizers whose patterns were examined; others encode a text whole.

    Args:
        spec: Parsed tokenizer.json without control tokens.
    """
    normalizer = spec.get("normalizer")
    if normalizer is not None and normalizer.get("type") not in {"NFC", "NFD"}:
        return False
    root = spec.get("pre_tokenizer") or {}
    steps = root["pretokenizers"] if root.get("type") == "Sequence" else [root]
    has_words = False
    for step in steps:
        match step.get("type"):
            case "ByteLevel":
                has_words = has_words or bool(step.get("use_regex", True))
            case "Split" if _is_known_split(step):
                has_words = True
            case "Digits":
                pass
            case _:
                return False
    return has_words


def _is_known_split(step: dict[str, Any]) -> bool:
    pattern = str(step.get("pattern", {}).get("Regex")).replace(r"\p{N}{1,3}", r"\p{N}")
    is_plain = step.get("behavior") == "Isolated" and not step.get("invert", False)
    return is_plain and pattern in _KNOWN_SPLITS


def safe_pieces(text: str, piece_chars: int) -> Iterator[tuple[int, str]]:
    """Cut a text at safe borders into pieces of at least `piece_chars` characters.

    Yields:
        The piece's first character's index, and the piece; the last one may be shorter.
    """
    start = 0
    while start < len(text):
        border = _SAFE_BORDER.search(text, start + piece_chars)
        end = len(text) if border is None else border.start()
        yield start, text[start:end]
        start = end


def join_encodings(
    encodings: Iterable[tuple[int, tokenizers.Encoding]], *, num_chars: int
) -> TextEncoding:
    """Join the encodings of consecutive pieces of one text, and close the gaps between spans.

    Args:
        encodings: The index of each piece's first character, and its encoding.
        num_chars: Code points in the whole text.
    """
    ids = [np.empty(0, np.int32)]
    spans = [np.empty((0, 2), np.int64)]
    for base, encoding in encodings:
        ids.append(np.array(encoding.ids, np.int32))
        spans.append(np.array(encoding.offsets, np.int64).reshape(-1, 2) + base)
    starts, ends = np.maximum.accumulate(np.concatenate(spans)).T.copy()
    if starts.size:
        starts[0] = 0
        ends[:-1] = np.maximum(ends[:-1], starts[1:])
        ends[-1] = num_chars
    return TextEncoding(token_ids=np.concatenate(ids), char_starts=starts, char_ends=ends)
