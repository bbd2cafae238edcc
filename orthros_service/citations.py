"""From the attention of an answer's tokens to the sentences of the documents that it rests on.

The rules, each against a known bias of attention mass; `benchmarks/citations.py` measures them:

* Only tokens with a letter or digit count: punctuation and line ends collect mass for every answer.
* The end of the last document is near the answer and attended for that alone, so its mass is
  divided by the usual profile of nearness.
* A token counts by its mass above the mean of all such tokens: a sentence does not win by its
  length, nor a document by its size. What is left is mass that stands out.
* Of sentences that stand out, one that holds the answer's words is preferred.
* The score is a sentence's share of all this, in 0 to 1. The best sentences are cited if their
  share is real and close to the best.
"""

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from orthros_service.engine.types import DocumentEvidence
from orthros_service.errors import EngineError
from orthros_service.types import EvidenceSpan

# A sentence without a border is cut here, so that a quote stays readable.
MAX_SENTENCE_CHARS = 400
# A cited sentence has at least this share of all, and this part of the best sentence's score.
MIN_SHARE = 0.02
MIN_RATIO_TO_BEST = 0.5
# Measured: word tokens at the very end get about four times the mean mass, which falls off by e
# every 32 tokens.
_NEARNESS_BOOST = 3.0
_NEARNESS_TOKENS = 32.0
# A sentence that holds all words of the answer counts four times; few candidates are compared.
_WORDS_BOOST = 3.0
_NUM_CANDIDATES = 32
_SHORT_WORD_CHARS = 3
# Lines of this length that end and go on with a letter are hard-wrapped prose, not rows of a table.
_WRAPPED_LINE_CHARS = range(50, 101)

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

# Marks that end a sentence: of scripts that put no space behind them, and of the others.
_FULL_STOPS = "\u3002\uff01\uff1f\uff61\u0964\u0965"
_POINTS = ".!?\u2026\u061f\u06d4"
_CLOSERS = "\"'\u201d\u2019\u00bb)\\]}\u300d\u300f\uff09\u3011\u300b\u3009"
_OPENERS = "\"'\u201c\u2018\u00ab([{"
# Possessive and guarded by look-behinds: no run of characters is tried twice, so time is linear.
_BREAK = re.compile(
    rf"""
      (?P<line> [\n\r\v\f\x85\u2028\u2029]\s*+ )
    | (?P<full_stop> (?<![{_FULL_STOPS}])[{_FULL_STOPS}]++[{_CLOSERS}]*+ )
    | (?P<point> (?<![{_POINTS}])[{_POINTS}]++[{_CLOSERS}]*+(?=\s|\Z) )
    """,
    re.VERBOSE,
)
_SPACE = re.compile(r"\s++")
_WORD = re.compile(r"\w+")
_LONGEST_WORD_CHARS = 20
_ABBREVIATION = re.compile(
    "al|approx|bros|ca|capt|cf|co|col|corp|dept|dr|eds?|eqs?|etc|figs?|gen|gov|hon|inc|jr|ltd?|"
    "messrs|mrs?|ms|nos|op|pp|prof|refs?|rev|sen|sgt|sr|st|vols?|vs|"
    "jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class _Passage:
    """A sentence, by its number in its document, or several whose last has this number."""

    document: int
    index: int
    start: int
    end: int
    score: float


def _by_score(passage: _Passage) -> tuple[float, int, int]:
    return -passage.score, passage.document, passage.index


def split_sentences(text: str) -> Iterator[tuple[int, int]]:
    """Cut a text into sentences, lines of tables and lists, and pieces of overlong ones.

    Args:
        text: Any text in any script; time is linear in its length.

    Yields:
        Start and end of each piece in code points, in order and without overlap. A piece is not
        empty, has no white space at its ends and at most `MAX_SENTENCE_CHARS` characters.
    """
    start = 0
    for match in _BREAK.finditer(text):
        if _is_border(text, start, match):
            yield from _pieces(text, start, match.end())
            start = match.end()
    yield from _pieces(text, start, len(text))


def _is_border(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether the sentence that began at start ends at this mark."""
    if match.lastgroup == "full_stop":
        return True
    next_start = _skip_space(text, match.end())
    following = text[next_start : next_start + 1]
    if match.lastgroup == "line":
        is_single = match.group().count("\n") == 1 and match.start() > start
        return not (is_single and _is_wrapped_line(text, match.start(), following))
    if following.islower() and "\n" not in text[match.end() : next_start]:
        return False
    return match.group() != "." or not _is_abbreviation(text, start, match.start())


def _is_wrapped_line(text: str, end: int, following: str) -> bool:
    """Whether the sentence goes on behind the line that ends here."""
    line_start = text.rfind("\n", max(0, end - _WRAPPED_LINE_CHARS.stop), end) + 1
    last = text[end - 1]
    goes_on = last not in ".!?:" if following.islower() else last.isalpha() or last in ",;-"
    return end - line_start in _WRAPPED_LINE_CHARS and goes_on and following.isalpha()


def _is_abbreviation(text: str, start: int, point: int) -> bool:
    """Whether the point at this place belongs to its word: "Dr.", "J.", "U.S." or a list number."""
    word_start = max(start, point - _LONGEST_WORD_CHARS)
    words = text[word_start:point].split()
    if not words:
        return False
    word = words[-1].lstrip(_OPENERS)
    is_first_word = word_start == start and len(words) == 1
    if is_first_word and (word.isdigit() or len(word) == 1):
        return True
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    parts = word.split(".")
    is_dotted = len(parts) > 1 and all(len(part) <= 2 and part.isalpha() for part in parts)
    return is_initial or is_dotted or _ABBREVIATION.fullmatch(word) is not None


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _pieces(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Trim text[start:end] and cut it where it is too long."""
    while True:
        start = min(_skip_space(text, start), end)
        if end - start <= MAX_SENTENCE_CHARS:
            break
        cut = _find_cut(text, start)
        yield start, start + len(text[start:cut].rstrip())
        start = cut
    end = start + len(text[start:end].rstrip())
    if start < end:
        yield start, end


def _find_cut(text: str, start: int) -> int:
    """The best place to cut an overlong piece, in the second half of what is allowed."""
    limit = start + MAX_SENTENCE_CHARS
    for mark in ("\n", "; ", ", ", " "):
        found = text.rfind(mark, start + MAX_SENTENCE_CHARS // 2, limit)
        if found >= 0:
            return found + len(mark)
    return limit


def select_evidence(
    texts: Sequence[str],
    evidence: Sequence[DocumentEvidence],
    answer: str,
    *,
    max_spans: int = 3,
) -> tuple[EvidenceSpan, ...]:
    """Pick the passages of the documents that the answer's tokens attended to most.

    Args:
        texts: The documents' stored texts.
        evidence: For each of them, its tokens' offsets and attention mass.
        answer: The whole answer.
        max_spans: Most passages to return.

    Returns:
        Passages, best first: whole sentences, adjacent ones merged, never overlapping and never
        empty. Each is evidence for the whole answer, trimmed. Nothing for an answer of white space
        or documents without mass. The same input gives the same output.

    Raises:
        EngineError: The evidence is not of these texts: other counts, or offsets outside a text.
    """
    if len(texts) != len(evidence):
        raise EngineError(
            f"Evidence came for {len(evidence)} documents, but the answer has {len(texts)}.",
            phase="decode",
        )
    answer_start = len(answer) - len(answer.lstrip())
    answer_end = len(answer.rstrip())
    if answer_start >= answer_end or max_spans < 1:
        return ()
    passages, total = _stand_out(texts, evidence)
    passages, gain = _prefer_words(texts, passages, answer)
    return tuple(
        EvidenceSpan(
            document_index=passage.document,
            start_char=passage.start,
            end_char=passage.end,
            answer_start=answer_start,
            answer_end=answer_end,
            score=min(1.0, passage.score / (total + gain)),
        )
        for passage in _choose(passages, total + gain, max_spans)
    )


def check_quote(text: str, start: int, end: int, quote: str) -> bool:
    """Whether the quote is a non-empty passage of the text at exactly this place."""
    return 0 <= start < end <= len(text) and text[start:end] == quote


def _stand_out(
    texts: Sequence[str], evidence: Sequence[DocumentEvidence]
) -> tuple[list[_Passage], float]:
    """The sentences with the most mass above the background, best first, and that mass of all."""
    tokens = [_read_words(*pair) for pair in zip(texts, evidence, strict=True)]
    if not any(mass.size for _, mass in tokens):
        return [], 0.0
    last, mass = tokens[-1]
    distance = np.arange(mass.size - 1, -1, -1)
    tokens[-1] = last, mass / (1 + _NEARNESS_BOOST * np.exp(-distance / _NEARNESS_TOKENS))
    background = float(np.concatenate([mass for _, mass in tokens]).mean())
    passages: list[_Passage] = []
    total = 0.0
    for document, (text, (last, mass)) in enumerate(zip(texts, tokens, strict=True)):
        spans = np.array(list(split_sentences(text)), dtype=np.int64).reshape(-1, 2)
        scores = np.zeros(len(spans) + 1)
        above = mass > background
        # A token may begin with the space before its sentence, so its last character decides.
        sentences = np.searchsorted(spans[:, 1], last[above], side="right")
        np.add.at(scores, sentences, mass[above] - background)
        total += float(scores.sum())
        passages += (
            _Passage(document, index, int(spans[index, 0]), int(spans[index, 1]), score)
            for index in np.argsort(-scores[:-1], kind="stable")[:_NUM_CANDIDATES].tolist()
            if (score := float(scores[index])) > 0
        )
    return heapq.nsmallest(_NUM_CANDIDATES, passages, key=_by_score), total


def _read_words(text: str, evidence: DocumentEvidence) -> tuple[_Ints, _Floats]:
    """Of the tokens with a letter or digit: the place of their last character, and their mass."""
    starts = evidence.char_starts.astype(np.int64)
    ends = evidence.char_ends.astype(np.int64)
    if ends.size and (starts.min() < 0 or ends.max() > len(text) or bool((starts > ends).any())):
        raise EngineError("Evidence offsets lie outside the document's text.", phase="decode")
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    is_word = np.zeros(int(codes.max(initial=0)) + 1, dtype=np.bool_)
    for code in np.flatnonzero(np.bincount(codes)):
        is_word[code] = chr(code).isalnum()
    num_before = np.concatenate(([0], np.cumsum(is_word[codes])))
    holds_word = num_before[ends] > num_before[starts]
    return ends[holds_word] - 1, evidence.mass[holds_word].astype(np.float64)


def _prefer_words(
    texts: Sequence[str], passages: list[_Passage], answer: str
) -> tuple[list[_Passage], float]:
    """Raise the scores of passages by the part of the answer's words they hold; the sum gained."""
    words = set(_WORD.findall(answer.casefold()))
    words = {word for word in words if len(word) > _SHORT_WORD_CHARS} or words
    if not words:
        return passages, 0.0
    raised = []
    for passage in passages:
        quote = texts[passage.document][passage.start : passage.end].casefold()
        ratio = len(words.intersection(_WORD.findall(quote))) / len(words)
        raised.append(replace(passage, score=passage.score * (1 + _WORDS_BOOST * ratio)))
    gain = sum(new.score - old.score for new, old in zip(raised, passages, strict=True))
    return sorted(raised, key=_by_score), gain


def _choose(passages: Sequence[_Passage], total: float, max_spans: int) -> list[_Passage]:
    """Those of the ranked passages that are cited, adjacent ones merged, best first."""
    if not passages:
        return []
    least = max(total * MIN_SHARE, passages[0].score * MIN_RATIO_TO_BEST)
    kept = [passage for passage in passages[:max_spans] if passage.score >= least]
    merged: list[_Passage] = []
    for passage in sorted(kept, key=lambda item: (item.document, item.index)):
        before = merged[-1] if merged else None
        if before and (before.document, before.index + 1) == (passage.document, passage.index):
            score = before.score + passage.score
            merged[-1] = replace(before, index=passage.index, end=passage.end, score=score)
        else:
            merged.append(passage)
    return sorted(merged, key=_by_score)
