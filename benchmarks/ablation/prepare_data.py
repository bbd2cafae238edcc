"""Make the rows of the ablation: books with needles and passages in them, and questions behind.

    python benchmarks/ablation/prepare_data.py --data ../shared/data --output .stage/ablation

Training needles come in five forms; evaluation draws from the same forms and words for half of its
needles, and from two forms that training never shows for the others. Books and passages of the
evaluation are held out.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import tokenizers
from needles import draw_unseen_fact
from rows import CONTINUATION, NEEDLE, PASSAGE_QUESTION, ROW_TOKENS, UNSEEN_NEEDLE, RowBuilder, room

from orthros_service.conversion.corpus import passage_around
from orthros_service.conversion.needles import Fact, draw_fact
from orthros_service.tokenization import PromptFormat, Tokenizer
from orthros_service.types import Message

SEGMENT_TOKENS = 256
MIN_DOCUMENT, MAX_DOCUMENT = 4096, 61440
EVAL_LENGTHS = (4096, 16384, 65536)


class Source:
    """Paragraphs of books, cut into token runs, and passages with questions."""

    def __init__(self, data: Path, model: Path, *, is_eval: bool, num_tokens: int) -> None:
        tokenizer = Tokenizer.from_directory(model)
        fast = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self.stop = fast.token_to_id("<|im_end|>")

        def encode(texts: list[str]) -> list[list[int]]:
            return [each.ids for each in fast.encode_batch_fast(texts, add_special_tokens=False)]

        self._encode = encode
        self.format = PromptFormat(tokenizer)
        self.paragraphs = _paragraphs(data, self._encode, is_eval=is_eval, num_tokens=num_tokens)
        self.passages = list(_passages(data, is_eval=is_eval))
        self._at = 0

    def ids(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return self._encode([text])[0]

    def take(self, num_tokens: int) -> list[list[int]]:
        """The next paragraphs, together at least so many tokens; the source repeats itself."""
        taken: list[list[int]] = []
        while num_tokens > 0:
            if self._at >= len(self.paragraphs):
                self._at = 0
            taken.append(self.paragraphs[self._at])
            num_tokens -= len(taken[-1])
            self._at += 1
        return taken

    def prompt(self, question: str) -> list[int]:
        """What follows the documents, up to where the answer begins."""
        return list(self.format.document_tail([Message(role="user", content=question)]))

    def answer(self, text: str) -> list[int]:
        """An answer and the token that ends it."""
        return [*self.ids(text), self.stop]


def _paragraphs(
    data: Path, encode: Callable[[list[str]], list[list[int]]], *, is_eval: bool, num_tokens: int
) -> list[list[int]]:
    files = sorted(data.glob("eval/books.test.parquet" if is_eval else "train/A_text/books-*"))
    found: list[list[int]] = []
    seen = 0
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(8, columns=["text"]):
            for text in batch.column("text").to_pylist():
                parts = [f"{part.strip()}\n\n" for part in text.split("\n\n") if part.strip()]
                runs = [ids[:1024] for ids in encode(parts)]
                # No more than this of one book, so that many books are seen.
                runs = runs[: len(runs) if is_eval else 4000]
                found += runs
                seen += sum(map(len, runs))
            if seen >= num_tokens:
                return found
    return found


def _passages(data: Path, *, is_eval: bool) -> Iterator[Fact]:
    names = (
        ("eval/xquad_en.test", "eval/nq_open_oracle.test", "eval/covidqa.test")
        if is_eval
        else ("train/B_qa/nq_open_oracle", "train/B_qa/covidqa", "train/B_qa/fairytaleqa")
    )
    for name in names:
        for row in pq.read_table(data / f"{name}.parquet").to_pylist():
            for qa in row["qas"]:
                if not qa["answers"] or not qa["evidence"] or not qa["answers"][0]:
                    continue
                begin, end = qa["evidence"][0]
                passage = passage_around(row["text"], begin, end)
                yield Fact(passage, qa["question"], qa["answers"][0][:200])


def _document(
    source: Source, rng: random.Random, num_tokens: int, *, needles: int, questions: int,
    is_eval: bool,
) -> tuple[list[int], list[tuple[list[int], list[int], int, int]]]:  # fmt: skip
    """A document of about so many tokens, with its segments."""
    header = list(source.format.header_ids)
    inserts: list[tuple[list[int], str, str, int]] = []
    for index in range(needles):
        is_unseen = is_eval and index % 2 == 1
        fact = draw_unseen_fact(rng) if is_unseen else draw_fact(rng)
        kind = UNSEEN_NEEDLE if is_unseen else NEEDLE
        inserts.append((source.ids(f"{fact.text}\n\n"), fact.question, fact.answer, kind))
    inserts += [
        (source.ids(f"{passage.text}\n\n"), passage.question, passage.answer, PASSAGE_QUESTION)
        for passage in rng.sample(source.passages, questions)
    ]
    body = num_tokens - len(header) - sum(len(ids) for ids, *_ in inserts)
    paragraphs = source.take(body + SEGMENT_TOKENS + 1)
    kept: list[list[int]] = []
    while paragraphs and body > 0:
        kept.append(paragraphs.pop(0)[:body])
        body -= len(kept[-1])
    rest = [token for paragraph in paragraphs for token in paragraph][:SEGMENT_TOKENS]
    rng.shuffle(inserts)
    places = sorted(rng.randrange(len(kept)) for _ in inserts)
    ids, segments, before = header, [], 0
    for place, (insert, question, answer, kind) in zip(places, inserts, strict=True):
        ids = ids + [token for paragraph in kept[before:place] for token in paragraph]
        before = place
        segments.append((source.prompt(question), source.answer(answer), kind, len(ids)))
        ids = ids + insert
    ids = ids + [token for paragraph in kept[before:] for token in paragraph]
    if len(rest) > 32:
        segments.append((rest[:1], rest[1:], CONTINUATION, -1))
    return ids, segments


def train_rows(source: Source, rng: random.Random, num_rows: int) -> RowBuilder:
    """Rows of documents whose lengths are uniform in their logarithm."""
    builder = RowBuilder.empty()
    while len(builder.rows) < num_rows or builder.free > MIN_DOCUMENT + 2048:
        if builder.free < MIN_DOCUMENT + 2048:
            builder.start_row()
        longest = min(MAX_DOCUMENT, builder.free - 2560)
        if longest < MIN_DOCUMENT:
            builder.used = ROW_TOKENS
            continue
        num_tokens = int(MIN_DOCUMENT * (longest / MIN_DOCUMENT) ** rng.random())
        document, segments = _document(
            source, rng, num_tokens, needles=9, questions=4, is_eval=False
        )
        if room(len(document), segments) > builder.free:
            builder.used = ROW_TOKENS
            continue
        builder.add(document, segments)
    return builder


def eval_rows(source: Source, rng: random.Random, documents: int) -> RowBuilder:
    """Rows of documents of each evaluated length."""
    builder = RowBuilder.empty()
    for num_tokens in EVAL_LENGTHS:
        for _ in range(documents):
            document, segments = _document(
                source, rng, num_tokens, needles=14, questions=6, is_eval=True
            )
            if room(len(document), segments) > builder.free:
                builder.start_row()
            builder.add(document, segments)
    return builder


def main() -> None:
    """Write train.npz and eval.npz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=240, help="training rows")
    parser.add_argument("--documents", type=int, default=12, help="evaluated per length")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for name, is_eval in (("eval", True), ("train", False)):
        tokens = 3_000_000 if is_eval else arguments.rows * ROW_TOKENS
        source = Source(arguments.data, arguments.model, is_eval=is_eval, num_tokens=tokens)
        rng = random.Random(7 if is_eval else 11)
        builder = (
            eval_rows(source, rng, arguments.documents)
            if is_eval
            else train_rows(source, rng, arguments.rows)
        )
        rows = builder.build()
        rows.save(arguments.output / f"{name}.npz")
        print(
            f"{name}: {len(rows.tokens)} rows, {len(rows.documents)} documents, "
            f"{len(rows.segments)} segments, {time.monotonic() - started:.0f} s"
        )


if __name__ == "__main__":
    main()
