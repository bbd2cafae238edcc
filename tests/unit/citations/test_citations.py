"""From attention mass to cited sentences: offsets, biases, thresholds, determinism."""

import re
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthros_service.citations import check_quote, select_evidence
from orthros_service.engine.types import DocumentEvidence
from orthros_service.errors import EngineError

TEXT = (
    "The mill stands by the river. It was built in 1871 by two brothers. Nobody works there now. "
    "Swans nest below the weir. The roof was repaired in 1990 after a storm."
)


def evidence_of(text: str, mass_of: Callable[[str], float]) -> DocumentEvidence:
    """Tokens as tokenizers cut them: a word with the space before it, or one other character."""
    tokens = list(re.finditer(r"\s?\w+|\S|\s", text))
    return DocumentEvidence(
        char_starts=np.array([t.start() for t in tokens], dtype=np.int64),
        char_ends=np.array([t.end() for t in tokens], dtype=np.int64),
        mass=np.array([mass_of(t.group()) for t in tokens], dtype=np.float32),
    )


def cite(text: str, mass_of: Callable[[str], float], max_spans: int = 3) -> list[str]:
    spans = select_evidence([text], [evidence_of(text, mass_of)], "Answer.", max_spans=max_spans)
    return [text[span.start_char : span.end_char] for span in spans]


def heavy(*words: str) -> Callable[[str], float]:
    return lambda token: 0.02 if token.strip() in words else 0.0001


def test_the_sentence_with_the_mass_is_cited_whole_and_trimmed() -> None:
    assert cite(TEXT, heavy("1871", "brothers")) == ["It was built in 1871 by two brothers."]


def test_the_best_sentence_comes_first_whatever_its_place() -> None:
    masses = {"1990": 0.03, "1871": 0.02}
    quotes = cite(TEXT, lambda token: masses.get(token.strip(), 0.0))
    assert quotes == [
        "The roof was repaired in 1990 after a storm.",
        "It was built in 1871 by two brothers.",
    ]


def test_adjacent_sentences_become_one_span() -> None:
    spans = select_evidence([TEXT], [evidence_of(TEXT, heavy("1871", "Nobody"))], "Since when?")
    assert [TEXT[s.start_char : s.end_char] for s in spans] == [
        "It was built in 1871 by two brothers. Nobody works there now."
    ]
    assert spans[0].score == pytest.approx(1.0)


def test_sentences_far_below_the_best_are_left_out() -> None:
    masses = {"1871": 0.05, "Swans": 0.004}
    quotes = cite(TEXT, lambda token: masses.get(token.strip(), 0.0))
    assert quotes == ["It was built in 1871 by two brothers."]


def test_punctuation_and_line_ends_that_soak_up_mass_do_not_count() -> None:
    text = "First.\n\nSecond holds the fact.\n\n* * *\n\nLast."
    masses = {".": 0.2, "\n": 0.5, "*": 0.3, "fact": 0.01}
    quotes = cite(text, lambda token: masses.get(token if token == "\n" else token.strip(), 0.0))
    assert quotes == ["Second holds the fact."]


def test_a_long_sentence_does_not_win_by_its_length() -> None:
    long = "This one " + "goes on " * 40 + "to its end."
    text = f"{long} The key is 42. {long} {long}"
    masses = {"42": 0.02}
    assert cite(text, lambda token: masses.get(token.strip(), 0.001))[0] == "The key is 42."


def test_nearness_to_the_question_does_not_win() -> None:
    filler = "We walked on and talked of many other things that day. " * 20
    text = f"The key is 42. {filler}Then we slept well."
    masses = {"42": 0.01, "slept": 0.03}
    assert cite(text, lambda token: masses.get(token.strip(), 0.0001))[0] == "The key is 42."


def test_of_sentences_alike_in_mass_one_with_the_answers_words_is_first() -> None:
    text = f"Ann saw the lighthouse. {TEXT} Bob saw the harbour. {TEXT} {TEXT}"
    evidence = evidence_of(text, heavy("saw"))
    first, *_ = select_evidence([text], [evidence], "In the HARBOUR", max_spans=1)
    assert text[first.start_char : first.end_char] == "Bob saw the harbour."


def test_documents_compete_and_carry_their_index() -> None:
    texts = ["Nothing here. Or here.", TEXT, "Brothers again. The end."]
    masses = [heavy(), heavy("1871"), heavy()]
    evidence = [evidence_of(t, m) for t, m in zip(texts, masses, strict=True)]
    (span,) = select_evidence(texts, evidence, "In 1871.")
    assert (span.document_index, TEXT[span.start_char : span.end_char]) == (
        1,
        "It was built in 1871 by two brothers.",
    )


def test_the_answer_is_covered_without_the_white_space_around_it() -> None:
    answer = "\n  In 1871. \n"
    (span,) = select_evidence([TEXT], [evidence_of(TEXT, heavy("1871"))], answer)
    assert answer[span.answer_start : span.answer_end] == "In 1871."


@pytest.mark.parametrize("answer", ["", "  \n\t "])
def test_an_empty_answer_has_no_evidence(answer: str) -> None:
    assert select_evidence([TEXT], [evidence_of(TEXT, heavy("1871"))], answer) == ()


def test_documents_without_mass_or_text_give_no_spans() -> None:
    assert cite(TEXT, lambda _: 0.0) == []
    assert cite("", heavy()) == []
    assert cite(" \n \n ", lambda _: 0.1) == []
    assert select_evidence([], [], "Answer.") == ()


def test_offsets_are_code_points() -> None:
    fact = "人口は1400万人。"
    text = f"\U0001f600\U0001f600 Olé! 東京は首都です。{fact} Fin."
    tokens = [(i, i + 1) for i in range(len(text))]
    at = text.index("1400")
    evidence = DocumentEvidence(
        char_starts=np.array([start for start, _ in tokens], dtype=np.int64),
        char_ends=np.array([end for _, end in tokens], dtype=np.int64),
        mass=np.array([0.1 * (at <= i < at + 4) for i in range(len(text))], dtype=np.float32),
    )
    (span,) = select_evidence([text], [evidence], "1400")
    assert text[span.start_char : span.end_char] == fact


def test_evidence_of_another_text_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="outside"):
        select_evidence([TEXT[:40]], [evidence_of(TEXT, heavy("1871"))], "Answer.")
    with pytest.raises(EngineError, match="0 documents"):
        select_evidence([TEXT], [], "Answer.")


SENTENCES = st.lists(
    st.text(alphabet="abc \n.!\u3002\u00e9\U0001f600", max_size=40), min_size=1, max_size=3
)


@given(SENTENCES, st.integers(1, 5), st.randoms(use_true_random=False))
def test_spans_are_ordered_disjoint_trimmed_and_repeatable(
    texts: Sequence[str], max_spans: int, random: Random
) -> None:
    evidence = [evidence_of(text, lambda _: random.choice([0.0, 0.01, 0.2])) for text in texts]
    spans = select_evidence(texts, evidence, "Answer.", max_spans=max_spans)
    assert len(spans) <= max_spans
    seen: set[tuple[int, int]] = set()
    for span in spans:
        text = texts[span.document_index]
        quote = text[span.start_char : span.end_char]
        assert quote == quote.strip() != ""
        assert check_quote(text, span.start_char, span.end_char, quote)
        assert 0 < span.score <= 1
        assert type(span.score) is float
        assert type(span.start_char) is int
        covered = {(span.document_index, i) for i in range(span.start_char, span.end_char)}
        assert not covered & seen
        seen |= covered
    assert spans == select_evidence(texts, evidence, "Answer.", max_spans=max_spans)


def test_check_quote_refuses_other_places_and_empty_quotes() -> None:
    assert check_quote("abc", 1, 3, "bc")
    assert not check_quote("abc", 0, 3, "bc")
    assert not check_quote("abc", 1, 1, "")
    assert not check_quote("abc", -2, 3, "bc")
    assert not check_quote("abc", 1, 9, "bc")
