"""Training rows from real text: hidden facts, passages with questions, and what comes next.

Row number n depends on the seed and on n alone, so a run that was cut goes on with the same data.
"""

import random
from collections.abc import Sequence

import numpy as np

from orthros_service.conversion.config import ConversionConfig
from orthros_service.conversion.corpus import Corpus, passage_around
from orthros_service.conversion.needles import Fact, draw_fact
from orthros_service.conversion.rows import Example, Segment, TrainingRow, pack, up
from orthros_service.errors import InvalidValueError
from orthros_service.tokenization import PromptFormat, Tokenizer
from orthros_service.types import Message

_CHARS_PER_TOKEN = 5
_MAX_ANSWER_CHARS = 200
_DOCUMENT_SHARE = 0.125
# What the segments of a document take at most, so that its length can be drawn first.
_SEGMENT_TOKENS = 160


class ExampleSource:
    """Makes the rows of a conversion.

    Args:
        config: The conversion.
        tokenizer: The model's.

    Raises:
        InvalidValueError: The data cannot be used, or its documents do not fit into a row.
    """

    def __init__(self, config: ConversionConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._format = PromptFormat(tokenizer)
        self._stop = self._format.answer_end()
        data = config.data
        self._texts = Corpus(data.texts, licences=data.licences)
        self._questions = (
            Corpus(data.questions, licences=data.licences, columns=("qas",))
            if data.passages
            else None
        )
        self._tail_room = up(
            (data.needles + data.passages) * _SEGMENT_TOKENS + data.continuation_tokens
        )
        if data.min_document_tokens + self._tail_room > config.training.row_tokens:
            raise InvalidValueError(
                f"A document of {data.min_document_tokens} tokens and its questions do not fit "
                f"into rows of {config.training.row_tokens}; raise training.row_tokens or lower "
                "data.min_document_tokens, data.needles or data.passages."
            )

    def row(self, number: int) -> TrainingRow:
        """One row; the same one for the same number."""
        training, data = self._config.training, self._config.data
        rng = random.Random(f"{training.seed}/{number}")  # noqa: S311 - data, not secrets
        examples: list[Example] = []
        free = training.row_tokens
        while free >= data.min_document_tokens + self._tail_room:
            longest = min(data.max_document_tokens, free - self._tail_room)
            ratio = longest / data.min_document_tokens
            example = self._example(rng, int(data.min_document_tokens * ratio ** rng.random()))
            if example.num_tokens > free:
                break
            examples.append(example)
            free -= example.num_tokens
        if not examples:
            raise InvalidValueError(
                f"Row {number}: the questions of a document take more than {self._tail_room} "
                "tokens; raise training.row_tokens or lower data.passages."
            )
        return pack(
            examples,
            row_tokens=training.row_tokens,
            document_weight=training.document_weight,
            document_share=_DOCUMENT_SHARE,
            rng=np.random.default_rng([training.seed, number]),
        )

    def _example(self, rng: random.Random, num_tokens: int) -> Example:
        data, training = self._config.data, self._config.training
        inserts = [draw_fact(rng) for _ in range(data.needles)]
        inserts += [each for _ in range(data.passages) if (each := self._passage(rng))]
        rng.shuffle(inserts)
        text = self._text(rng, num_tokens * _CHARS_PER_TOKEN)
        whole, ends = _inserted(text, inserts, rng, last=int(num_tokens * 3.2))
        encoding = self._tokenizer.encode_text(whole)
        room = num_tokens - len(self._format.header_ids)
        ids = np.concatenate([self._format.header_ids, encoding.token_ids[:room]])
        seen = int(encoding.char_ends[min(room, len(encoding.token_ids)) - 1])
        segments = [
            self._segment(insert.question, insert.answer)
            for insert, end in zip(inserts, ends, strict=True)
            if end <= seen
        ]
        rest = encoding.token_ids[room : room + data.continuation_tokens + 1].tolist()
        if data.continuation_tokens and len(rest) > 1:
            weight = training.continuation_weight * max(1, len(segments))
            segments.append(
                Segment(prompt_ids=tuple(rest[:1]), answer_ids=tuple(rest[1:]), weight=weight)
            )
        return Example(document_ids=ids, segments=tuple(segments))

    def _segment(self, question: str, answer: str) -> Segment:
        prompt = self._format.document_tail([Message(role="user", content=question)])
        ids = self._tokenizer.encode_text(answer).token_ids.tolist()
        return Segment(prompt_ids=prompt, answer_ids=(*ids, self._stop), weight=1.0)

    def _passage(self, rng: random.Random) -> Fact | None:
        assert self._questions is not None
        row = self._questions.row(rng.randrange(len(self._questions)))
        asked = [qa for qa in row["qas"] if qa["answers"] and qa["answers"][0] and qa["evidence"]]
        if not asked:
            return None
        qa = rng.choice(asked)
        begin, end = qa["evidence"][0]
        return Fact(
            passage_around(row["text"], begin, end),
            qa["question"],
            qa["answers"][0][:_MAX_ANSWER_CHARS],
        )

    def _text(self, rng: random.Random, num_chars: int) -> str:
        """Text of so many characters from somewhere in the corpus, in whole runs."""
        parts: list[str] = []
        while num_chars > 0:
            text = self._texts.row(rng.randrange(len(self._texts)))["text"]
            begin = rng.randrange(max(1, len(text) - num_chars))
            parts.append(text[begin : begin + num_chars])
            num_chars -= len(parts[-1]) + 1
        return "\n\n".join(parts)


def _inserted(
    text: str, inserts: Sequence[Fact], rng: random.Random, *, last: int
) -> tuple[str, list[int]]:
    """Text with the inserts between its paragraphs, and where each of them ends.

    Args:
        text: With paragraphs; a text without is cut anywhere.
        inserts: In the order in which they will stand.
        rng: Draws their places.
        last: Character after which nothing is put.
    """
    gaps = [at for at in _paragraph_ends(text) if at <= last] or [min(last, len(text))]
    places = sorted(rng.choice(gaps) for _ in inserts)
    parts, ends, done, length = [], [], 0, 0
    for place, insert in zip(places, inserts, strict=True):
        for part in (text[done:place], f"\n\n{insert.text}\n\n"):
            parts.append(part)
            length += len(part)
        done = place
        ends.append(length)
    return "".join([*parts, text[done:]]), ends


def _paragraph_ends(text: str) -> list[int]:
    ends, at = [], text.find("\n\n")
    while at >= 0:
        ends.append(at)
        at = text.find("\n\n", at + 2)
    return ends
